"""Requests as the Tinker SDK sends them, turned into operations; every fault found is told by its place in the body."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from tinker_local.errors import InvalidRequestError
from tinker_local.operations import (
    Array,
    Datum,
    ForwardBackward,
    Ints,
    LoraSpec,
    OptimStep,
    Sample,
    SamplingParams,
    SparseLayout,
)

Json = Mapping[str, Any]

_DTYPES: Mapping[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
}
_NAMED_DTYPES: Mapping[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "int64": np.dtype(np.int64)}
_MISSING = object()
_MOST_CELLS = 1 << 24  # of a tensor that is sent sparse and held dense
_MOST_SAMPLES = 4096
_LARGEST = 1e30  # of an optimizer's parameters: what float32 can still multiply


@dataclass(frozen=True)
class TrainingBody:
    """A forward_backward request and its place among the run's requests."""

    operation: ForwardBackward
    seq_id: int | None


def parse_json(body: bytes) -> Json:
    """Return the body as a JSON object; raises InvalidRequestError if it is none."""
    try:
        parsed = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {type(parsed).__name__}")
    return parsed


def take(body: Json, key: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
    """Return body[key], which must be of that type (a bool is no number); null counts as absent.

    Raises InvalidRequestError if it is of another type, or absent and there is no default.
    """
    value = body.get(key)
    if value is None:
        if default is _MISSING:
            raise InvalidRequestError(f"{key!r} is missing from the request")
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(each.__name__ for each in kinds)
        raise InvalidRequestError(f"{key!r} must be {names}, not {value!r}")
    return value


def lora_spec(body: Json) -> LoraSpec:
    """Read a lora_config."""
    rank, seed = take(body, "rank", int), take(body, "seed", int, None)
    if not 1 <= rank <= 1024:
        raise InvalidRequestError(f"lora_config.rank is {rank}: it must be 1 to 1024")
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise InvalidRequestError(f"lora_config.seed is {seed}: it must fit in 64 bits")
    return LoraSpec(
        rank=rank,
        seed=seed,
        train_attn=take(body, "train_attn", bool, True),
        train_mlp=take(body, "train_mlp", bool, True),
        train_unembed=take(body, "train_unembed", bool, True),
    )


def optim_step(body: Json) -> OptimStep:
    """Read an optim_step request."""
    if "optimizer_params" in body:
        raise InvalidRequestError(f"only Adam is served here, not {body['optimizer_params']!r}")
    params = take(body, "adam_params", dict)
    numbers = {
        key: _real(params, key, default)
        for key, default in {
            "learning_rate": 1e-4,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-12,
            "weight_decay": 0.0,
            "grad_clip_norm": 0.0,
        }.items()
    }
    for key, value in numbers.items():
        if not (0 <= value <= _LARGEST and (value < 1 or not key.startswith("beta"))):
            raise InvalidRequestError(f"adam_params.{key} is {value}, which no Adam step can use")
    return OptimStep(model_id=take(body, "model_id", str), **numbers)


def _real(body: Json, key: str, default: float) -> float:
    try:
        return float(take(body, key, (int, float), default))
    except OverflowError as error:
        raise InvalidRequestError(f"{key!r} is too large a number") from error


def forward_backward(body: bytes, content_type: str, *, forward_only: bool = False) -> TrainingBody:
    """Read a forward_backward request, in protobuf or JSON by its content type.

    `forward_only` is for the older JSON endpoint that has no backward pass.
    """
    if "protobuf" in content_type:
        return _forward_backward_from_proto(body)
    parsed = parse_json(body)
    content = take(parsed, "forward_input" if forward_only else "forward_backward_input", dict)
    data = take(content, "data", list)
    operation = ForwardBackward(
        model_id=take(parsed, "model_id", str),
        data=tuple(_datum_from_json(datum, f"data[{index}]") for index, datum in enumerate(data)),
        loss_fn=take(content, "loss_fn", str),
        loss_config=take(content, "loss_fn_config", dict, {}),
        forward_only=forward_only,
    )
    return TrainingBody(_nonempty(operation), take(parsed, "seq_id", int, None))


def _nonempty(operation: ForwardBackward) -> ForwardBackward:
    if not operation.data:
        raise InvalidRequestError("the request holds no data: give at least one datum")
    return operation


def _forward_backward_from_proto(body: bytes) -> TrainingBody:
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequestError(f"the body is no ForwardBackwardRequest: {error}") from error
    config: dict[str, float | str] = dict(message.loss_fn_config)
    if "loss_fn_config_v2" in message.DESCRIPTOR.fields_by_name:  # newer SDKs
        for key, value in message.loss_fn_config_v2.items():
            config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    operation = ForwardBackward(
        model_id=message.model_id,
        data=tuple(_datum_from_proto(datum, f"data[{index}]") for index, datum in enumerate(message.data)),
        loss_fn=message.loss_fn,
        loss_config=config,
        forward_only=message.forward_only,
    )
    return TrainingBody(_nonempty(operation), message.seq_id or None)


def _datum_from_proto(datum: Any, where: str) -> Datum:
    pieces = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise InvalidRequestError(f"{where}: this service takes text tokens only, not {chunk.WhichOneof('chunk')}")
        pieces.append(_buffer(chunk.encoded_text.tokens, np.dtype(np.int32), f"{where}: model_input"))
    inputs = {key: _tensor_from_proto(tensor, f"{where}: {key}") for key, tensor in datum.loss_fn_inputs.items()}
    return Datum(_join(pieces), inputs)


def _tensor_from_proto(tensor: Any, where: str) -> Array:
    if tensor.dtype not in _DTYPES:
        raise InvalidRequestError(f"{where} has the unknown dtype {tensor.dtype}")
    dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        wide: np.dtype[Any] = np.dtype(np.int64)
        rows, columns = _buffer(csr.crow_indices, wide, where), _buffer(csr.col_indices, wide, where)
        return _dense(_buffer(csr.values, dtype, where), rows, columns, shape, 0, where)
    return _shaped(_buffer(tensor.dense, dtype, where), shape or None, where)


def _buffer(raw: bytes, dtype: np.dtype[Any], where: str) -> Array:
    if len(raw) % dtype.itemsize:
        raise InvalidRequestError(f"{where} holds {len(raw)} bytes, which are no whole {dtype.name} values")
    values = np.frombuffer(raw, dtype=dtype)
    return values.astype(np.int64) if dtype.kind == "i" else values.copy()


def _datum_from_json(datum: Any, where: str) -> Datum:
    if not isinstance(datum, dict):
        raise InvalidRequestError(f"{where} must be an object")
    inputs = take(datum, "loss_fn_inputs", dict)
    return Datum(
        model_input(take(datum, "model_input", dict), where),
        {key: tensor(value, f"{where}: {key}") for key, value in inputs.items()},
    )


def model_input(body: Json, where: str) -> Ints:
    """Read a ModelInput of text chunks."""
    pieces = []
    for chunk in take(body, "chunks", list):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            kind = chunk.get("type") if isinstance(chunk, dict) else chunk
            raise InvalidRequestError(f"{where}: this service takes text tokens only, not {kind!r}")
        tokens = take(chunk, "tokens", list)
        pieces.append(_numbers(tokens, np.dtype(np.int64), f"{where}: tokens"))
    return _join(pieces)


def tensor(body: Any, where: str, *, pad: int = 0) -> Array:
    """Read a TensorData; entries that a sparse one leaves out become `pad`."""
    if not isinstance(body, dict):
        raise InvalidRequestError(f"{where} must be a tensor object")
    dtype = _NAMED_DTYPES.get(take(body, "dtype", str))
    if dtype is None:
        raise InvalidRequestError(f"{where}: dtype must be float32 or int64, not {body['dtype']!r}")
    values, shape = _numbers(take(body, "data", list), dtype, where), take(body, "shape", list, None)
    rows, columns = take(body, "sparse_crow_indices", list, None), take(body, "sparse_col_indices", list, None)
    if rows is None:
        return _shaped(values, shape, where)
    wide: np.dtype[Any] = np.dtype(np.int64)
    return _dense(values, _numbers(rows, wide, where), _numbers(columns or [], wide, where), shape or [], pad, where)


def _numbers(values: list[Any], dtype: np.dtype[Any], where: str) -> Array:
    try:
        return np.asarray(values, dtype=dtype).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{where} must hold {dtype.name} numbers: {error}") from error


def _shaped(values: Array, shape: list[int] | None, where: str) -> Array:
    if shape is None:
        return values
    if _size(shape, where) != values.size:
        raise InvalidRequestError(f"{where} has {values.size} values for shape {shape}")
    return values.reshape(shape)


def _size(shape: list[int], where: str) -> int:
    """Return how many cells a tensor of that shape has; raises InvalidRequestError if none can have it."""
    sizes = [size for size in shape if isinstance(size, int) and not isinstance(size, bool) and size >= 0]
    cells = math.prod(sizes)
    if len(sizes) != len(shape) or cells > _MOST_CELLS:
        raise InvalidRequestError(f"{where} can't have the shape {shape}")
    return cells


def _dense(values: Array, rows: Ints, columns: Ints, shape: list[int], pad: int, where: str) -> Array:
    _size(shape, where)
    fits = (
        len(shape) == 2
        and len(rows) == shape[0] + 1
        and len(columns) == len(values)
        and rows[0] == 0
        and rows[-1] == len(values)
        and (np.diff(rows) >= 0).all()
        and (not len(columns) or (columns.min() >= 0 and columns.max() < shape[1]))
    )
    if not fits:
        raise InvalidRequestError(f"{where} is no valid sparse tensor of shape {shape}")
    dense = np.full(shape, pad, dtype=values.dtype)
    dense[SparseLayout(rows, columns).cells()] = values
    return dense


def _join(pieces: list[Array]) -> Ints:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def sample(body: Json, sampler_id: str) -> Sample:
    """Read a sample request for that sampler."""
    targets, count = body.get("target_prompt_logprobs"), take(body, "num_samples", int, 1)
    if not 1 <= count <= _MOST_SAMPLES:
        raise InvalidRequestError(f"num_samples is {count}: it must be 1 to {_MOST_SAMPLES}")
    return Sample(
        sampler_id=sampler_id,
        prompt=model_input(take(body, "prompt", dict), "prompt"),
        num_samples=count,
        params=_sampling_params(take(body, "sampling_params", dict)),
        prompt_logprobs=take(body, "prompt_logprobs", bool, False),
        prompt_logprobs_last_n=take(body, "prompt_logprobs_last_n", int, None),
        topk_prompt=take(body, "topk_prompt_logprobs", int, 0),
        topk_sample=take(body, "topk_sample_logprobs", int, 0),
        target_tokens=None if targets is None else tensor(targets, "target_prompt_logprobs", pad=-1),
        target_layout=_layout(targets),
        alternatives=take(body, "prompt_alt_tokens_k", int, 0),
    )


def _layout(body: Any) -> SparseLayout | None:
    """Return which cells a tensor lists, if it is sparse; `tensor` has checked that they fit."""
    if not isinstance(body, dict) or body.get("sparse_crow_indices") is None:
        return None
    rows, columns = (np.array(body[f"sparse_{part}_indices"], dtype=np.int64) for part in ("crow", "col"))
    return SparseLayout(rows, columns)


def _sampling_params(body: Json) -> SamplingParams:
    tokens, strings = _stops(body.get("stop"))
    return SamplingParams(
        max_tokens=take(body, "max_tokens", int, None),
        seed=take(body, "seed", int, None),
        temperature=_real(body, "temperature", 1.0),
        top_k=take(body, "top_k", int, -1),
        top_p=_real(body, "top_p", 1.0),
        stop_tokens=tokens,
        stop_strings=strings,
    )


def _stops(stop: Any) -> tuple[frozenset[int] | None, tuple[str, ...]]:
    if stop is None:
        return None, ()
    if isinstance(stop, str):
        return frozenset(), (stop,)
    if isinstance(stop, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in stop):
        return frozenset(stop), ()
    if isinstance(stop, list) and all(isinstance(item, str) and item for item in stop):
        return frozenset(), tuple(stop)
    raise InvalidRequestError(f"sampling_params.stop must be a string, strings or token ids, not {stop!r}")
