"""Training through the SDK: losses, gradients, optimizer steps, and several runs at once."""

import math

import numpy as np
import pytest
import tinker
import torch
from tinker import types

TEXT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]


def logprobs(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [entry["logprobs"].tolist() for entry in output.loss_fn_outputs]


def test_loss_falls_as_steps_are_taken(training, datum):
    """Ten steps on one text make it more likely."""
    losses = []
    for _ in range(10):
        passed = training.forward_backward([datum(TEXT)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)
        losses.append(passed.result(timeout=60).metrics["loss:sum"])
    assert losses[-1] < 0.5 * losses[0]


def test_loss_is_the_weighted_sum_of_target_logprobs(training, datum):
    """Nothing is averaged: the loss is -sum(weights * logprobs) over all data."""
    weights = [0.0, 0.5, 2.0, 1.0]
    output = training.forward([datum(TEXT[:5], weights=weights)] * 2, "cross_entropy").result(timeout=60)
    found = logprobs(output)
    assert found[0] == found[1]
    assert output.metrics["loss:sum"] == pytest.approx(-2 * np.dot(weights, found[0]), rel=1e-5)


def test_first_pass_gives_the_base_models_logprobs(training, client, datum, ready):
    """A fresh adapter changes nothing: B is zero."""
    base = ready(client.create_sampling_client(base_model="tiny"))
    expected = base.compute_logprobs(types.ModelInput.from_ints(TEXT)).result(timeout=60)
    output = training.forward([datum(TEXT)], "cross_entropy").result(timeout=60)
    assert logprobs(output)[0] == pytest.approx(expected[1:], abs=1e-5)


def test_gradients_add_up_until_the_step(client, datum, ready):
    """Two passes of one datum and a step equal one pass of two and a step."""
    results = []
    for batches in ([[datum(TEXT)], [datum(TEXT[3:])]], [[datum(TEXT), datum(TEXT[3:])]]):
        run = ready(client.create_lora_training_client("tiny", rank=4, seed=3))
        for batch in batches:
            run.forward_backward(batch, "cross_entropy").result(timeout=60)
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)
        results.append(logprobs(run.forward([datum(TEXT)], "cross_entropy").result(timeout=60))[0])
    assert results[0] == pytest.approx(results[1], abs=1e-5)


def test_forward_leaves_no_gradient(training, datum):
    """After a forward pass alone a step does not move the weights."""
    before = training.forward([datum(TEXT)], "cross_entropy").result(timeout=60)
    step = training.optim_step(types.AdamParams(learning_rate=0.1)).result(timeout=60)
    after = training.forward([datum(TEXT)], "cross_entropy").result(timeout=60)
    assert step.metrics == {"unclipped_grad_l2:mean": 0.0}
    assert logprobs(after) == logprobs(before)


def test_same_seed_gives_the_same_run(client, datum, ready):
    """The adapter's start depends on the seed alone."""
    runs = [ready(client.create_lora_training_client("tiny", rank=4, seed=seed)) for seed in (1, 1, 2)]
    found = []
    for run in runs:
        run.forward_backward([datum(TEXT)], "cross_entropy").result(timeout=60)
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)
        found.append(logprobs(run.forward([datum(TEXT)], "cross_entropy").result(timeout=60)))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("part", ["train_attn", "train_mlp", "train_unembed"])
def test_only_the_chosen_part_is_trained(client, rest, part, datum, ready):
    """Each part can be trained alone, and its checkpoint says so."""
    parts = dict.fromkeys(["train_attn", "train_mlp", "train_unembed"], False) | {part: True}
    run = ready(client.create_lora_training_client("tiny", rank=2, **parts))
    before = run.forward_backward([datum(TEXT)], "cross_entropy").result(timeout=60)
    run.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)
    after = run.forward([datum(TEXT)], "cross_entropy").result(timeout=60)
    info = rest.get_weights_info_by_tinker_path(run.save_state("state").result(timeout=60).path).result(timeout=60)
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"]
    assert {key: getattr(info, key) for key in parts} == parts


def test_importance_ratio_of_an_on_policy_sample_is_one(training, datum, ready):
    """The logprobs that sampling reports are those of the training pass, to 1e-4."""
    training.forward_backward([datum(TEXT)], "cross_entropy").result(timeout=60)
    training.optim_step(types.AdamParams(learning_rate=3e-2)).result(timeout=60)
    sampler = ready(training.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=24, seed=5, stop=[])
    response = sampler.sample(types.ModelInput.from_ints(TEXT), 4, params).result(timeout=60)
    for sequence in response.sequences:
        output = training.forward([datum(TEXT + sequence.tokens)], "cross_entropy").result(timeout=60)
        assert logprobs(output)[0][-24:] == pytest.approx(sequence.logprobs, abs=1e-4)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_policy_losses_raise_what_has_a_positive_advantage(training, loss, datum):
    """A step of each policy loss makes rewarded tokens likelier."""
    before = logprobs(training.forward([datum(TEXT)], "cross_entropy").result(timeout=60))[0]
    rewarded = datum(TEXT, logprobs=before, advantages=[1.0] * len(before))
    training.forward_backward([rewarded], loss).result(timeout=60)
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)
    after = logprobs(training.forward([datum(TEXT)], "cross_entropy").result(timeout=60))[0]
    assert sum(after) > sum(before)


def test_ppo_takes_its_thresholds_from_the_request(training, datum):
    """A ratio above the threshold is clipped there."""
    before = logprobs(training.forward([datum(TEXT)], "cross_entropy").result(timeout=60))[0]
    old = [value - math.log(2) for value in before]
    data = [datum(TEXT, logprobs=old, advantages=[1.0] * len(old))]
    limits = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    output = training.forward(data, "ppo", limits).result(timeout=60)
    assert output.metrics["loss:sum"] == pytest.approx(-1.5 * len(old), rel=1e-4)


def test_targets_may_be_several_per_position(training, datum):
    """cross_entropy takes [T, K] targets and weights, and answers logprobs of that shape."""
    targets = torch.tensor([[TEXT[1], 5], [TEXT[2], 6], [TEXT[3], 7]])
    weights = torch.tensor([[0.7, 0.3], [0.6, 0.4], [1.0, 0.0]])
    several = types.Datum(
        model_input=types.ModelInput.from_ints(TEXT[:3]), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    output = training.forward_backward([several, datum(TEXT[:4])], "cross_entropy").result(timeout=60)
    found = output.loss_fn_outputs[0]["logprobs"].to_torch()
    plain = output.loss_fn_outputs[1]["logprobs"].to_torch()
    assert found[:, 0].tolist() == pytest.approx(plain.tolist(), abs=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(float(-(weights * found).sum() - plain.sum()), rel=1e-5)


def test_custom_loss_trains_as_its_gradient_says(client, datum, ready):
    """forward_backward_custom with the cross-entropy as the custom loss equals cross_entropy."""
    runs = [ready(client.create_lora_training_client("tiny", rank=4, seed=9)) for _ in range(2)]
    runs[0].forward_backward([datum(TEXT)], "cross_entropy").result(timeout=60)
    runs[1].forward_backward_custom(
        [datum(TEXT)], lambda data, found: (-torch.stack([part.sum() for part in found]).sum(), {"mine": 1.0})
    ).result(timeout=60)
    found = []
    for run in runs:
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)
        found.append(logprobs(run.forward([datum(TEXT)], "cross_entropy").result(timeout=60))[0])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_runs_keep_to_themselves(client, datum, ready):
    """Training one run leaves another as it was, when their requests interleave."""
    first, second = (ready(client.create_lora_training_client("tiny", rank=4, seed=4)) for _ in range(2))
    expected = logprobs(second.forward([datum(TEXT)], "cross_entropy").result(timeout=60))
    futures = []
    for _ in range(4):
        futures.append(first.forward_backward([datum(TEXT)], "cross_entropy"))
        futures.append(first.optim_step(types.AdamParams(learning_rate=1e-2)))
        futures.append(second.forward([datum(TEXT)], "cross_entropy"))
    results = [future.result(timeout=60) for future in futures]
    assert [logprobs(result) for result in results[2::3]] == [expected] * 4
    assert results[9].metrics["loss:sum"] < results[0].metrics["loss:sum"]


def test_adam_follows_the_parameters_of_its_step(client, datum, ready):
    """A step is torch's AdamW with the betas, eps, decay and clipping of the request."""
    run = ready(client.create_lora_training_client("tiny", rank=4, seed=6))
    run.forward_backward([datum(TEXT)], "cross_entropy").result(timeout=60)
    step = run.optim_step(types.AdamParams(learning_rate=0.0, grad_clip_norm=0.1)).result(timeout=60)
    after = run.forward([datum(TEXT)], "cross_entropy").result(timeout=60)
    fresh = ready(client.create_lora_training_client("tiny", rank=4, seed=6))
    expected = fresh.forward([datum(TEXT)], "cross_entropy").result(timeout=60)
    assert step.metrics["unclipped_grad_l2:mean"] > 0.1
    assert logprobs(after) == logprobs(expected)


def test_info_names_the_model_and_a_tokenizer_that_loads(training):
    """get_info's tokenizer is a folder on this machine, so the SDK's get_tokenizer works without a hub."""
    info = training.get_info()
    text = "a  b\n\n<|im_start|>user\n{}<|im_end|>"
    tokenizer = training.get_tokenizer()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == ("tiny", True, 4)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_optimizer_that_is_not_served_is_refused(client, ready):
    """Only Adam is here, and asking for another says so."""
    with pytest.raises(tinker.BadRequestError, match="dimuon"):
        ready(client.create_lora_training_client("tiny", optimizer=types.DimuonOptimizerConfig()))
