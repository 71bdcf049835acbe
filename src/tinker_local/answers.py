"""Results in the form in which the Tinker SDK reads them: JSON, or protobuf for the two large kinds."""

from itertools import groupby
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from tinker_local.errors import ServiceError
from tinker_local.operations import (
    Array,
    Loaded,
    ModelCreated,
    ModelUnloaded,
    Result,
    SampleOutput,
    Saved,
    SparseLayout,
    StepTaken,
    TopLogprobs,
    TrainingOutput,
)

_OUTPUT_TYPE = "ArrayRecord"


def to_proto(result: Result) -> bytes | None:
    """Return the result as protobuf; None if its kind has no such form."""
    if isinstance(result, TrainingOutput):
        return _training_output(result).SerializeToString()
    if isinstance(result, SampleOutput):
        return _sample_output(result).SerializeToString()
    return None


def failure(error: ServiceError) -> dict[str, Any]:
    """Return the answer to a future that failed."""
    return {"error": str(error), "category": error.category}


def to_json(result: Result) -> dict[str, Any]:
    """Return the result as a JSON object."""
    match result:
        case ModelCreated(model_id):
            return {"type": "create_model", "model_id": model_id}
        case ModelUnloaded(model_id):
            return {"type": "unload_model", "model_id": model_id}
        case StepTaken(metrics):
            return {"metrics": dict(metrics)}
        case Loaded(model_id, path):
            return {"type": "load_weights", "model_id": model_id, "path": path}
        case Saved():
            found = {"type": result.kind, "path": result.path, "sampling_session_id": result.sampler_id}
            return {key: value for key, value in found.items() if value is not None}
        case TrainingOutput():
            outputs = [{key: _tensor(value) for key, value in output.items()} for output in result.outputs]
            return {"loss_fn_output_type": _OUTPUT_TYPE, "loss_fn_outputs": outputs, "metrics": dict(result.metrics)}
        case SampleOutput():
            return _sample_json(result)


def _tensor(values: Array) -> dict[str, Any]:
    dtype = "int64" if values.dtype.kind == "i" else "float32"
    return {"data": values.ravel().tolist(), "dtype": dtype, "shape": list(values.shape)}


def _sample_json(result: SampleOutput) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "stop" if sequence.stopped else "length",
                "tokens": sequence.tokens.tolist(),
                "logprobs": sequence.logprobs.tolist(),
            }
            for sequence in result.sequences
        ],
        "prompt_cache_hit_tokens": result.cached_tokens,
    }
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [None if np.isnan(value) else float(value) for value in result.prompt_logprobs]
    if result.prompt_top is not None:
        top = result.prompt_top
        answer["topk_prompt_logprobs"] = [None] + [
            list(zip(ids.tolist(), logprobs.tolist(), strict=True))
            for ids, logprobs in zip(top.token_ids[1:], top.logprobs[1:], strict=True)
        ]
    return answer


def _training_output(result: TrainingOutput) -> pb.ForwardBackwardOutput:
    message = pb.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE, metrics=dict(result.metrics))
    # One record holds arrays whose shapes differ in the first dimension only.
    for _, outputs in groupby(result.outputs, key=lambda output: [value.shape[1:] for value in output.values()]):
        group = list(outputs)
        record = message.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE)
        if "num_datums" in record.DESCRIPTOR.fields_by_name:
            record.num_datums = len(group)
        for name in group[0]:
            _fill_batched(record.fields[name], [output[name] for output in group])
    return message


def _fill_batched(message: pb.BatchedTensor, arrays: list[Array]) -> None:
    flat = [np.ascontiguousarray(array, dtype=np.float32) for array in arrays]
    message.data = b"".join(array.tobytes() for array in flat)
    message.offsets = np.cumsum([0] + [array.nbytes for array in flat], dtype=np.int64).tobytes()
    message.dtype = pb.DTYPE_FLOAT32
    message.trailing_shape.extend(flat[0].shape[1:])


def _sample_output(result: SampleOutput) -> pb.SampleResponse:
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.cached_tokens)
    for sequence in result.sequences:
        entry = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stopped else pb.STOP_REASON_LENGTH,
            tokens=sequence.tokens.astype(np.int32).tobytes(),
            logprobs=sequence.logprobs.tobytes(),
        )
        if sequence.top is not None:
            _fill_top(entry.topk_sampled_logprobs, sequence.top)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.tobytes()
    if result.prompt_top is not None:
        _fill_top(message.topk_prompt_logprobs, result.prompt_top)
    if result.target_logprobs is not None:
        _fill_tensor(message.target_prompt_logprobs, result.target_logprobs, result.target_layout)
    if result.alternatives is not None:
        _fill_tensor(message.prompt_alt_tokens.tokens, result.alternatives[0])
        _fill_tensor(message.prompt_alt_tokens.logprobs, result.alternatives[1])
    return message


def _fill_top(message: pb.TopkLogprobs, top: TopLogprobs) -> None:
    message.length, message.k = top.token_ids.shape
    message.token_ids = top.token_ids.astype(np.int32).tobytes()
    message.logprobs = top.logprobs.astype(np.float32).tobytes()


def _fill_tensor(message: pb.Tensor, values: Array, layout: SparseLayout | None = None) -> None:
    whole = values.dtype.kind == "i"
    message.dtype = pb.DTYPE_INT32 if whole else pb.DTYPE_FLOAT32
    message.shape.extend(values.shape)
    listed = (values if layout is None else values[layout.cells()]).astype(np.int32 if whole else np.float32).tobytes()
    if layout is None:
        message.dense = listed
        return
    message.sparse_csr.values = listed
    message.sparse_csr.crow_indices = layout.rows.tobytes()
    message.sparse_csr.col_indices = layout.columns.tobytes()
