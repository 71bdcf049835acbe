"""The loss functions against plain references written token by token, and their gradients against differences."""

import math

import pytest
import torch

from tinker_local.errors import InvalidRequestError
from tinker_local.losses import LOSSES, configure, find

LOGPROBS = [-0.7, -1.9, -0.2, -3.0]
OLD = [-1.0, -1.2, -0.9, -2.9]
ADVANTAGES = [1.5, -0.5, 2.0, 0.0]
WEIGHTS = [0.0, 1.0, 0.5, 2.0]
MASK = [0.0, 1.0, 1.0, 1.0]


def clip(ratio, low=0.8, high=1.2):
    return min(max(ratio, low), high)


def ratios():
    return [math.exp(new - old) for new, old in zip(LOGPROBS, OLD, strict=True)]


def sequence_ratio():
    inside = [new - old for new, old, mask in zip(LOGPROBS, OLD, MASK, strict=True) if mask]
    return math.exp(sum(inside) / len(inside))


def expected(name):
    """The loss written out over plain floats."""
    if name == "cross_entropy":
        return -sum(weight * value for weight, value in zip(WEIGHTS, LOGPROBS, strict=True))
    terms = zip(ratios(), ADVANTAGES, LOGPROBS, OLD, strict=True)
    s = sequence_ratio()
    return -sum(
        {
            "importance_sampling": lambda r, a, new, old: r * a,
            "ppo": lambda r, a, new, old: min(r * a, clip(r) * a),
            "cispo": lambda r, a, new, old: clip(r, 0, 4) * a * new,
            "gspo": lambda r, a, new, old: min(s * a, clip(s) * a),
            "dro": lambda r, a, new, old: new * a - 0.5 * 0.05 * (new - old) ** 2,
        }[name](*term)
        for term in terms
    )


def inputs():
    values = {"logprobs": OLD, "advantages": ADVANTAGES, "weights": WEIGHTS, "sequence_ratio_mask": MASK}
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()}


def logprobs():
    return torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_loss_is_its_formula(name):
    """Each loss is the sum that its reference writes out."""
    loss = LOSSES[name].function(logprobs(), inputs(), configure(LOSSES[name], name, {}))
    assert loss.item() == pytest.approx(expected(name), abs=1e-12)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_gradient_is_that_of_the_formula(name):
    """The gradients of the losses without a detached part agree with finite differences."""
    config = configure(LOSSES[name], name, {})
    assert torch.autograd.gradcheck(lambda values: LOSSES[name].function(values, inputs(), config), logprobs())


def test_cispo_weights_the_score_with_a_constant():
    """No gradient flows through cispo's clipped ratio: d loss / d logp = -clip(r) * A."""
    values = logprobs()
    LOSSES["cispo"].function(values, inputs(), configure(LOSSES["cispo"], "cispo", {})).backward()
    gradient = [-clip(ratio, 0, 4) * advantage for ratio, advantage in zip(ratios(), ADVANTAGES, strict=True)]
    assert values.grad.tolist() == pytest.approx(gradient)


def test_gspo_gives_each_token_its_own_gradient():
    """With the ratio inside the thresholds, d loss / d logp_t = -s * A_t."""
    values = logprobs()
    limits = configure(LOSSES["gspo"], "gspo", {"clip_low_threshold": 0.1, "clip_high_threshold": 10.0})
    LOSSES["gspo"].function(values, inputs(), limits).backward()
    assert values.grad.tolist() == pytest.approx([-sequence_ratio() * advantage for advantage in ADVANTAGES])


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.gradient_input])
def test_gradient_is_zero_where_the_gradient_input_is(name):
    """Where the named input is zero no gradient is lost by leaving the position out."""
    values = logprobs()
    LOSSES[name].function(values, inputs(), configure(LOSSES[name], name, {})).backward()
    zero = inputs()[LOSSES[name].gradient_input] == 0
    assert zero.any()
    assert values.grad[zero].tolist() == [0.0] * int(zero.sum())


def test_thresholds_may_be_given_per_token():
    """Per-token thresholds take the place of the configured ones."""
    given = {**inputs(), "clip_high_threshold": torch.tensor([10.0, 10.0, 1.0, 10.0], dtype=torch.float64)}
    loss = LOSSES["ppo"].function(logprobs(), given, configure(LOSSES["ppo"], "ppo", {}))
    r = ratios()
    assert loss.item() == pytest.approx(-(r[0] * 1.5 - 0.5 * max(r[1], 0.8) + 2.0))


def test_an_unknown_loss_is_refused_with_the_known_ones():
    """The message lists what there is."""
    with pytest.raises(InvalidRequestError, match="unknown loss_fn 'mse': this service has cispo, cross_entropy"):
        find("mse")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("stable_reinforce", "no formula of it is known here: train with 'ppo'"), ("custom", "forward_backward_custom")],
)
def test_a_loss_that_only_the_hosted_service_has_says_what_to_do(name, sentence):
    """A name that the SDK knows is not called unknown."""
    with pytest.raises(InvalidRequestError, match=f"loss_fn '{name}' is not served here: .*{sentence}"):
        find(name)


def test_cispo_caps_the_upper_side_alone():
    """By default a ratio far below 1 keeps its weight and one far above 4 counts as 4."""
    values = torch.tensor([-5.0, -1.0], dtype=torch.float64, requires_grad=True)
    given = {"logprobs": torch.tensor([-1.0, -5.0]).double(), "advantages": torch.ones(2).double()}
    LOSSES["cispo"].function(values, given, configure(LOSSES["cispo"], "cispo", {})).backward()
    assert values.grad.tolist() == pytest.approx([-math.exp(-4), -4.0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beta": "x"}, "must be a number, not 'x'"),
        ({"beta": True}, "must be a number, not True"),
        ({"beta": 10**400}, "must be a number"),
        ({"beta": math.nan}, "must be a number, not nan"),
        ({"gamma": 1.0}, "has no option 'gamma': it takes beta"),
    ],
    ids=["text", "bool", "huge", "nan", "unknown"],
)
def test_options_that_do_not_fit_are_refused(options, sentence):
    """An option is a known number or an error."""
    with pytest.raises(InvalidRequestError, match=sentence):
        configure(LOSSES["dro"], "dro", options)
