"""Losses, gradients and optimizer steps of one adapter.

The sequences of a request are packed into rows (see `packing`), so a prompt that several of them share is computed
once. The output head runs with gradients only where the loss has one; elsewhere it only reports log-probabilities.
"""

from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from tinker_local import losses
from tinker_local.attention import RowLayout
from tinker_local.errors import InvalidRequestError
from tinker_local.losses import Loss
from tinker_local.model import LanguageModel, State
from tinker_local.operations import Array, Datum, ForwardBackward, Ints, LoraSpec, OptimStep, StepTaken, TrainingOutput
from tinker_local.packing import Row, pack

_ROW_TOKENS = 2048  # a longer row computes no faster, but a prompt that many sequences share is computed once in it
_HEAD_POSITIONS = 128  # positions that go through the output head at once: 25 MB of logits for the default model


@dataclass
class TrainingModel:
    """A run's adapter in memory, with its optimizer."""

    model_id: str
    spec: LoraSpec
    optimizer: torch.optim.AdamW


def start(model: LanguageModel, model_id: str, spec: LoraSpec) -> TrainingModel:
    """Give the model a fresh adapter under the run's id."""
    model.add_adapter(model_id, spec, trainable=True)
    parameters = [parameter for _, parameter in model.parameters(model_id)]
    return TrainingModel(model_id, spec, torch.optim.AdamW(parameters, lr=0.0))


def forward_backward(
    model: LanguageModel, run: TrainingModel, request: ForwardBackward
) -> Generator[None, None, TrainingOutput]:
    """Compute the request's loss and add its gradient to the run's, pausing after every row.

    Either all of the request's gradient is added or, when it raises, none of it.
    Raises InvalidRequestError if the request doesn't fit the loss or the model, or a loss is not finite.
    """
    loss = losses.find(request.loss_fn)
    config = losses.configure(loss, request.loss_fn, request.loss_config)
    for index, datum in enumerate(request.data):
        check_datum(datum, f"data[{index}]", request.loss_fn, loss, model)
    before = _gradients(model, run)
    logprobs: list[Array] = [np.empty(0, np.float32)] * len(request.data)
    total = 0.0
    try:
        for row in pack([datum.tokens for datum in request.data], budget=_ROW_TOKENS):
            model.activate(run.model_id)
            total += _run_row(model, row, request, loss, config, logprobs)
            yield
    except BaseException:
        _restore(model, run, before)
        raise
    if not np.isfinite(total):
        _restore(model, run, before)
        raise InvalidRequestError(f"the {request.loss_fn} loss is {total}: the run's gradients are as they were before")
    return TrainingOutput(tuple({"logprobs": values} for values in logprobs), {"loss:sum": total})


def _run_row(
    model: LanguageModel,
    row: Row,
    request: ForwardBackward,
    loss: Loss,
    config: dict[str, float],
    logprobs: list[Array],
) -> float:
    """Add one row's gradient, fill in its sequences' log-probabilities and return its loss."""
    data = [request.data[member] for member in row.members]
    with (
        torch.set_grad_enabled(not request.forward_only),
        nullcontext() if request.forward_only else model.keeping_activations(tokens=len(row.tokens)),
    ):
        hidden = model.hidden(row.tokens, row.positions, RowLayout(row, model.device))
        found = _target_logprobs(model, hidden, row, data, loss)
        terms = [
            loss.function(values, _tensors(model, datum), config) for values, datum in zip(found, data, strict=True)
        ]
        total = torch.stack(terms).sum()
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
    for member, values in zip(row.members, found, strict=True):
        logprobs[member] = values.detach().cpu().numpy()
    return float(total.detach())


def _target_logprobs(
    model: LanguageModel, hidden: torch.Tensor, row: Row, data: list[Datum], loss: Loss
) -> list[torch.Tensor]:
    """Return the log-probability of every target of every sequence, computing each (position, target) pair once."""
    targets = [datum.inputs["target_tokens"] for datum in data]
    places = [
        np.broadcast_to(path.reshape(-1, *[1] * (target.ndim - 1)), target.shape)
        for path, target in zip(row.paths, targets, strict=True)
    ]
    trained = [_trained(datum, loss) & torch.is_grad_enabled() for datum in data]
    place = np.concatenate([array.ravel() for array in places])
    target = np.concatenate([array.ravel() for array in targets])
    needed = np.concatenate([array.ravel() for array in trained])
    flat = torch.empty(len(place), device=model.device)
    with torch.no_grad():
        flat[model.on_device(~needed)] = _pair_logprobs(model, hidden.detach(), place[~needed], target[~needed])
    if needed.any():
        flat = flat.index_put((model.on_device(needed),), _pair_logprobs(model, hidden, place[needed], target[needed]))
    sizes = [array.size for array in targets]
    return [part.view(array.shape) for part, array in zip(torch.split(flat, sizes), targets, strict=True)]


def _trained(datum: Datum, loss: Loss) -> Array:
    """Return where the loss can have a gradient."""
    targets = datum.inputs["target_tokens"]
    if loss.gradient_input is None:
        return np.ones(targets.shape, dtype=bool)
    return np.asarray(datum.inputs[loss.gradient_input] != 0)


def _pair_logprobs(model: LanguageModel, hidden: torch.Tensor, places: Ints, targets: Ints) -> torch.Tensor:
    """Return log p(target | place) for each pair [N], running the output head once for each distinct place."""
    rows, inverse = np.unique(places, return_inverse=True)
    pieces = []
    for start in range(0, len(rows), _HEAD_POSITIONS):
        inside = (inverse >= start) & (inverse < start + _HEAD_POSITIONS)
        chunk = hidden[model.on_device(rows[start : start + _HEAD_POSITIONS])]
        where, chosen = model.on_device(inverse[inside] - start), model.on_device(targets[inside])
        # With more than one chunk, keeping every chunk's logits for the backward pass would cost more memory than time.
        keep = len(rows) <= _HEAD_POSITIONS or not torch.is_grad_enabled()
        values = (
            _chosen_logprobs(model, chunk, where, chosen)
            if keep
            else checkpoint(_chosen_logprobs, model, chunk, where, chosen, use_reentrant=False)
        )
        pieces.append((model.on_device(np.flatnonzero(inside)), values))
    if not pieces:
        return hidden.new_empty(0)
    order = torch.cat([index for index, _ in pieces])
    return torch.cat([values for _, values in pieces])[torch.argsort(order)]


def _chosen_logprobs(
    model: LanguageModel, hidden: torch.Tensor, where: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    logits = model.logits(hidden)
    return logits[where, targets] - torch.logsumexp(logits, dim=-1)[where]


def _tensors(model: LanguageModel, datum: Datum) -> dict[str, torch.Tensor]:
    return {key: model.on_device(value) for key, value in datum.inputs.items()}


def check_datum(datum: Datum, where: str, name: str, loss: Loss, model: LanguageModel) -> None:
    """Raise InvalidRequestError unless the datum has what the loss needs, in shapes and ranges that fit the model."""
    length = len(datum.tokens)
    if length == 0:
        raise InvalidRequestError(f"{where}: model_input is empty")
    if length > model.context_length:
        raise InvalidRequestError(f"{where}: {length} tokens, over the model's context of {model.context_length}")
    check_ids(datum.tokens, f"{where}: model_input", model)
    wanted = ("target_tokens", *loss.inputs)
    missing = [key for key in wanted if key not in datum.inputs]
    if missing:
        raise InvalidRequestError(f"{where}: loss_fn {name!r} needs loss_fn_inputs {', '.join(map(repr, missing))}")
    unknown = sorted(set(datum.inputs) - set(wanted) - set(loss.optional))
    if unknown:
        raise InvalidRequestError(f"{where}: loss_fn {name!r} takes no loss_fn_inputs {', '.join(map(repr, unknown))}")
    targets = datum.inputs["target_tokens"]
    if targets.ndim not in ((1, 2) if name == "cross_entropy" else (1,)) or targets.shape[0] != length:
        raise InvalidRequestError(f"{where}: target_tokens has shape {list(targets.shape)} for {length} input tokens")
    check_ids(targets, f"{where}: target_tokens", model)
    for key, values in datum.inputs.items():
        if values.shape != targets.shape:
            raise InvalidRequestError(
                f"{where}: {key} has shape {list(values.shape)}, target_tokens {list(targets.shape)}: they must match"
            )
        if not np.isfinite(values).all():
            raise InvalidRequestError(f"{where}: {key} holds a value that is not finite")


def check_ids(ids: Array, where: str, model: LanguageModel) -> None:
    """Raise InvalidRequestError unless every id is one of the model's tokens."""
    if ids.size and (ids.min() < 0 or ids.max() >= model.vocabulary):
        wrong = ids[(ids < 0) | (ids >= model.vocabulary)][0]
        raise InvalidRequestError(f"{where} holds the id {wrong}: {model.name!r} has ids 0 to {model.vocabulary - 1}")


def _gradients(model: LanguageModel, run: TrainingModel) -> list[torch.Tensor | None]:
    found = [parameter.grad for _, parameter in model.parameters(run.model_id)]
    return [None if gradient is None else gradient.clone() for gradient in found]


def _restore(model: LanguageModel, run: TrainingModel, gradients: list[torch.Tensor | None]) -> None:
    for (_, parameter), gradient in zip(model.parameters(run.model_id), gradients, strict=True):
        parameter.grad = gradient


def optim_step(model: LanguageModel, run: TrainingModel, request: OptimStep) -> StepTaken:
    """Take an AdamW step and clear the gradients.

    Raises InvalidRequestError if a gradient is not finite; the weights stay, the gradients go.
    """
    parameters = [parameter for _, parameter in model.parameters(run.model_id)]
    limit = request.grad_clip_norm if request.grad_clip_norm > 0 else float("inf")
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
    if not np.isfinite(norm):
        run.optimizer.zero_grad()
        raise InvalidRequestError(
            f"the gradient's norm is {norm}: the step was not taken and the gradients are cleared"
        )
    for group in run.optimizer.param_groups:
        group.update(
            lr=request.learning_rate,
            betas=(request.beta1, request.beta2),
            eps=request.eps,
            weight_decay=request.weight_decay,
        )
    run.optimizer.step()
    run.optimizer.zero_grad()
    return StepTaken({"unclipped_grad_l2:mean": norm})


def optimizer_state(model: LanguageModel, run: TrainingModel) -> State:
    """Return a copy of the optimizer's moments and step counts, under the parameters' names."""
    state: State = {}
    for key, parameter in model.parameters(run.model_id):
        for part, value in run.optimizer.state.get(parameter, {}).items():
            state[f"{key}.{part}"] = value.detach().clone()
    return state


def load_optimizer_state(model: LanguageModel, run: TrainingModel, state: State) -> None:
    """Replace the optimizer's state; an empty one starts it afresh."""
    run.optimizer.state.clear()
    run.optimizer.zero_grad()
    for key, parameter in model.parameters(run.model_id):
        parts = {part: state[f"{key}.{part}"] for part in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{part}" in state}
        if parts:
            run.optimizer.state[parameter] = {part: _beside(parameter, part, value) for part, value in parts.items()}


def _beside(parameter: torch.Tensor, part: str, value: torch.Tensor) -> torch.Tensor:
    # The step count stays where it is: AdamW keeps it on the CPU.
    return value.clone() if part == "step" else value.to(parameter.device, copy=True)
