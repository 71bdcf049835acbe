"""Where tensors are made: a device other than the model's, as torch's default, must not turn up in any computation.

No test machine has a GPU. Under the default device `meta`, a tensor that is made without naming its device holds
nothing, and computing with it and the model's tensors raises.
"""

import numpy as np
import pytest
import torch

from tinker_local import training, weights
from tinker_local.losses import LOSSES
from tinker_local.model import LanguageModel
from tinker_local.operations import Datum, ForwardBackward, LoraSpec, Sample, SamplingParams
from tinker_local.sampling import Sampler


@pytest.fixture(scope="module")
def base():
    return weights.load("tiny", progress=print)


@pytest.fixture(scope="module")
def model(base):
    return LanguageModel(base)


def sampled(model, base):
    """Sample with every question about the prompt asked, twice, so that the second starts from the first's prompt."""
    sampler = Sampler(model, base.tokenizer.decode)
    prompt = np.array(base.tokenizer.encode("one two three"), dtype=np.int64)
    params = SamplingParams(max_tokens=6, seed=3, top_k=5, top_p=0.9, stop_tokens=frozenset())
    asked = Sample(
        "asked",
        prompt,
        3,
        params,
        prompt_logprobs=True,
        topk_prompt=2,
        topk_sample=2,
        target_tokens=np.zeros((len(prompt) - 1, 1), np.int64),
        alternatives=2,
    )
    found = []
    for request in (asked, Sample("plain", prompt, 2, params), Sample("more", np.append(prompt, prompt), 1, params)):
        sampler.submit("ticket", request, None)
        while sampler.busy:
            found += [finished.outcome for finished in sampler.step()]
    return repr(found)


def trained(model, loss, default):
    """Take a pass over two sequences that begin alike, and return the gradients' sums."""
    tokens = np.arange(3, 15)
    rows = {key: np.linspace(-1, 1, 12, dtype=np.float32) for key in ("logprobs", "advantages", "weights")}
    inputs = {"target_tokens": tokens + 1, "sequence_ratio_mask": np.ones(12, np.float32), **rows}
    wanted = ("target_tokens", *LOSSES[loss].inputs)
    data = [Datum(line, {key: inputs[key] for key in wanted}) for line in (tokens, np.append(tokens[:8], tokens[:4]))]
    run = training.start(model, "run", LoraSpec(4, seed=1))
    with torch.device(default):
        for _ in training.forward_backward(
            model, run, ForwardBackward("run", tuple(data), loss, {}, forward_only=False)
        ):
            pass
    sums = [float(parameter.grad.sum()) for _, parameter in model.parameters("run")]
    model.remove_adapter("run")
    return sums


def test_sampling_makes_every_tensor_on_the_model_s_device(model, base):
    """Sampling gives the same under a default device that is not the model's."""
    plain = sampled(model, base)
    with torch.device("meta"):
        assert sampled(model, base) == plain


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_training_makes_every_tensor_on_the_model_s_device(model, loss):
    """A pass gives the same gradients under a default device that is not the model's."""
    assert trained(model, loss, "meta") == trained(model, loss, "cpu")
