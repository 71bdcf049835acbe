"""The loss functions, by the name a request gives them.

Each is a pure function of one sequence's target log-probabilities [T] (cross_entropy also [T, K]) and its loss inputs,
and returns a sum over the sequence's tokens; a request's loss is the sum over its sequences. Nothing is averaged.

Formulas: https://tinker-docs.thinkingmachines.ai/tinker/losses/ and a page for each loss. Default thresholds: the
cookbook's tutorials/202_loss_functions.py, which gives ppo 0.8 and 1.2 and cispo 0 and 4; gspo's are ppo's, because
its page writes the same clip.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tinker_local.errors import InvalidRequestError

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]
LossFunction = Callable[[torch.Tensor, Inputs, Config], torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss function and what a request must and may give it."""

    function: LossFunction
    inputs: tuple[str, ...]  # besides target_tokens
    gradient_input: str | None  # where this input is zero, the gradient is zero; None: no input tells
    config: Mapping[str, float]  # the options and their defaults
    optional: tuple[str, ...] = ()


def cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-sum(w * logp)."""
    return -(inputs["weights"] * logprobs).sum()


def importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-sum(exp(logp - logq) * A), the policy gradient corrected for sampling from q."""
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-sum(min(r * A, clip(r) * A)), r = exp(logp - logq)."""
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages).sum()


def cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-sum(clip(r) * A * logp) with no gradient through clip(r)."""
    clipped = _clip(_ratio(logprobs, inputs), inputs, config).detach()
    return -(clipped * inputs["advantages"] * logprobs).sum()


def dro(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-sum(A * logp - beta / 2 * (logp - logq)^2)."""
    distance = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * config["beta"] * distance**2).sum()


def gspo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-sum(min(s * A, clip(s) * A)): as ppo, but every token has the sequence's ratio s and its own gradient.

    s is the geometric mean of the token ratios where sequence_ratio_mask is not zero.
    """
    inside = inputs["sequence_ratio_mask"] != 0
    if not inside.any():
        raise InvalidRequestError("loss_fn 'gspo' needs a sequence_ratio_mask that marks at least one token")
    mean = (logprobs.detach() - inputs["logprobs"])[inside].mean()
    ratio, advantages = torch.exp(mean + logprobs - logprobs.detach()), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages).sum()


def _ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _clip(ratio: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    low = inputs.get("clip_low_threshold", ratio.new_tensor(config["clip_low_threshold"]))
    high = inputs.get("clip_high_threshold", ratio.new_tensor(config["clip_high_threshold"]))
    return torch.clamp(ratio, low, high)


_POLICY_INPUTS = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_ONE_SIDED = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",), "weights", {}),
    "importance_sampling": Loss(importance_sampling, _POLICY_INPUTS, "advantages", {}),
    "ppo": Loss(ppo, _POLICY_INPUTS, "advantages", _CLIP, optional=tuple(_CLIP)),
    "cispo": Loss(cispo, _POLICY_INPUTS, "advantages", _ONE_SIDED, optional=tuple(_CLIP)),
    "gspo": Loss(gspo, (*_POLICY_INPUTS, "sequence_ratio_mask"), "advantages", _CLIP, optional=tuple(_CLIP)),
    "dro": Loss(dro, _POLICY_INPUTS, None, {"beta": 0.05}),
}


# What the SDK knows and this service can't compute, with what to do instead.
_UNAVAILABLE: Mapping[str, str] = {
    "stable_reinforce": "no formula of it is known here: train with 'ppo' or 'cispo' (AsyncConfig(loss_fn='ppo'))",
    "custom": "the SDK computes a custom loss itself: call forward_backward_custom",
}


def find(name: str) -> Loss:
    """Return the loss of that name.

    Raises InvalidRequestError if there is none.
    """
    if name in _UNAVAILABLE:
        raise InvalidRequestError(f"loss_fn {name!r} is not served here: {_UNAVAILABLE[name]}")
    if name not in LOSSES:
        raise InvalidRequestError(f"unknown loss_fn {name!r}: this service has {', '.join(sorted(LOSSES))}")
    return LOSSES[name]


def configure(loss: Loss, name: str, options: Mapping[str, float | str]) -> dict[str, float]:
    """Return the loss's options with defaults filled in.

    Raises InvalidRequestError if an option is unknown or no number.
    """
    for key, value in options.items():
        if key not in loss.config:
            known = ", ".join(sorted(loss.config)) or "no options"
            raise InvalidRequestError(f"loss_fn_config of {name!r} has no option {key!r}: it takes {known}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise InvalidRequestError(f"loss_fn_config[{key!r}] of {name!r} must be a number, not {value!r}")
    return {**loss.config, **{key: float(value) for key, value in options.items()}}
