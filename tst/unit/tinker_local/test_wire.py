"""Requests: what they become, and that no body, however odd, is anything but an operation or a told fault."""

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from tinker_local import wire
from tinker_local.errors import InvalidRequestError
from tinker_local.operations import ForwardBackward, LoraSpec, OptimStep, SamplingParams

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


def spoiled(body):
    """Bodies like this one with some value, at any depth, replaced by anything or left out."""
    if isinstance(body, dict):
        keys = sorted(body)
        changed = st.sampled_from(keys).flatmap(
            lambda key: (
                spoiled(body[key]).map(lambda value: {**body, key: value})
                | st.just({name: value for name, value in body.items() if name != key})
            )
        )
        return changed | anything
    if isinstance(body, list) and body:
        return spoiled(body[0]).map(lambda value: [value, *body[1:]]) | anything
    return anything


TENSOR = {"data": [1, 2], "dtype": "int64", "shape": [2]}
SPARSE = {
    "data": [5.0],
    "dtype": "float32",
    "shape": [2, 3],
    "sparse_crow_indices": [0, 1, 1],
    "sparse_col_indices": [2],
}
DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "loss_fn_inputs": {"target_tokens": TENSOR, "weights": SPARSE},
}
TRAINING = {
    "model_id": "run",
    "seq_id": 3,
    "forward_backward_input": {"data": [DATUM], "loss_fn": "cross_entropy", "loss_fn_config": {"beta": 0.5}},
}
SAMPLE = {
    "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
    "num_samples": 2,
    "sampling_params": {"max_tokens": 4, "seed": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "stop": ["x"]},
    "prompt_logprobs": True,
    "target_prompt_logprobs": SPARSE,
}
LORA = {"rank": 4, "seed": 1, "train_attn": True}
ADAM = {"model_id": "run", "adam_params": {"learning_rate": 0.1, "beta1": 0.9, "grad_clip_norm": 1.0}}


@given(spoiled(TRAINING))
def test_an_odd_training_body_is_read_or_refused(body):
    """Nothing but InvalidRequestError comes of it, so that it is a 400 with a sentence."""
    raw = json.dumps(body).encode()
    with contextlib.suppress(InvalidRequestError):
        assert wire.forward_backward(raw, "application/json").operation.data


@given(spoiled(SAMPLE))
def test_an_odd_sample_body_is_read_or_refused(body):
    """Nothing but InvalidRequestError comes of it."""
    with contextlib.suppress(InvalidRequestError):
        assert wire.sample(wire.parse_json(json.dumps(body).encode()), "s").num_samples >= 1


@given(spoiled(LORA), spoiled(ADAM))
def test_odd_options_are_read_or_refused(lora, adam):
    """Nothing but InvalidRequestError comes of an adapter's or an optimizer's options."""
    for read, body in ((wire.lora_spec, lora), (wire.optim_step, adam)):
        with contextlib.suppress(InvalidRequestError):
            assert read(wire.parse_json(json.dumps(body).encode()))


@given(st.binary(max_size=60))
def test_odd_bytes_are_read_or_refused(raw):
    """Bytes that are no message are refused in either form."""
    for content_type in ("application/json", "application/x-protobuf"):
        with pytest.raises(InvalidRequestError):
            wire.forward_backward(raw, content_type)


def test_json_that_is_too_deep_is_refused():
    """A body that no parser can nest is told, not crashed on."""
    with pytest.raises(InvalidRequestError, match="not JSON"):
        wire.parse_json(b"[" * 100_000)


def test_a_training_body_becomes_arrays():
    """Tensors become arrays of their shape; what a sparse one leaves out is zero."""
    read = wire.forward_backward(json.dumps(TRAINING).encode(), "application/json")
    (datum,) = read.operation.data
    assert (read.seq_id, read.operation.model_id, read.operation.loss_config) == (3, "run", {"beta": 0.5})
    assert datum.tokens.tolist() == [1, 2]
    assert {key: value.tolist() for key, value in datum.inputs.items()} == {
        "target_tokens": [1, 2],
        "weights": [[0.0, 0.0, 5.0], [0.0, 0.0, 0.0]],
    }


def test_protobuf_and_json_say_the_same():
    """One datum in both forms becomes one operation."""
    message = pb.ForwardBackwardRequest(model_id="run", seq_id=3, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    datum.loss_fn_inputs["target_tokens"].dtype = pb.DTYPE_INT64
    datum.loss_fn_inputs["target_tokens"].shape.extend([2])
    datum.loss_fn_inputs["target_tokens"].dense = np.array([1, 2], np.int64).tobytes()
    found = wire.forward_backward(message.SerializeToString(), "application/x-protobuf")
    content = {"data": [{**DATUM, "loss_fn_inputs": {"target_tokens": TENSOR}}], "loss_fn": "cross_entropy"}
    body = {"model_id": "run", "seq_id": 3, "forward_backward_input": content}
    expected = wire.forward_backward(json.dumps(body).encode(), "application/json")
    assert (plain(found.operation), found.seq_id) == (plain(expected.operation), expected.seq_id)


def plain(operation: ForwardBackward):
    data = [
        (datum.tokens.tolist(), {key: value.tolist() for key, value in datum.inputs.items()})
        for datum in operation.data
    ]
    return operation.model_id, data, operation.loss_fn, dict(operation.loss_config), operation.forward_only


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ([-1, -2], r"weights can't have the shape \[-1, -2\]"),
        ([1 << 40, 1 << 40], "weights can't have the shape"),
        (["a"], r"weights can't have the shape \['a'\]"),
        ([3], r"weights has 2 values for shape \[3\]"),
    ],
    ids=["negative", "huge", "text", "other"],
)
def test_a_shape_that_does_not_fit_is_named(shape, sentence):
    """A tensor's shape must be one that its values fill."""
    with pytest.raises(InvalidRequestError, match=sentence):
        wire.tensor({"data": [1, 2], "dtype": "int64", "shape": shape}, "weights")


@pytest.mark.parametrize(
    ("stop", "tokens", "strings"),
    [
        (None, None, ()),
        ([], frozenset(), ()),
        ("x", frozenset(), ("x",)),
        (["x", "y"], frozenset(), ("x", "y")),
        ([1, 2], {1, 2}, ()),
    ],
    ids=["none", "never", "string", "strings", "ids"],
)
def test_stops_are_read_as_they_are_meant(stop, tokens, strings):
    """No stop means the model's end, an empty one none at all."""
    read = wire.sample({"prompt": {"chunks": []}, "sampling_params": {"stop": stop}}, "s").params
    assert read == SamplingParams(stop_tokens=tokens, stop_strings=strings)


def test_defaults_are_the_documented_ones():
    """An Adam step and an adapter that say nothing are those of the SDK's types."""
    assert wire.optim_step({"model_id": "run", "adam_params": {}}) == OptimStep("run", 1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
    assert wire.lora_spec({"rank": 2}) == LoraSpec(2)
