"""What the SDK's TrainingClient calls: each request becomes an operation of a run, in the order of its requests."""

import secrets
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tinker_local import bodies, exports, wire
from tinker_local.checkpoints import check_name, expiry
from tinker_local.errors import InvalidRequestError
from tinker_local.operations import (
    CreateModel,
    LoadState,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveState,
    UnloadModel,
)
from tinker_local.service import Service, sampler_id_of
from tinker_local.wire import Json, take

Handler = Callable[[Request, Service], Awaitable[Response]]


async def _create_model(request: Request, service: Service) -> Response:
    body = await bodies.read_json(request)
    operation = await _new_model(body, service, take(body, "lora_config", dict), take(body, "base_model", str))
    service.submit(f"{operation.model_id}:create", operation)
    return bodies.future(f"{operation.model_id}:create", operation.model_id)


async def _new_model(body: Json, service: Service, lora: Json, base_model: str) -> CreateModel:
    service.check_model(base_model)
    optimizer = take(body, "optimizer_config", dict, {}).get("type", "adamw")
    if optimizer != "adamw":
        raise InvalidRequestError(f"optimizer {optimizer!r} is not served: use the default, adamw")
    session = await service.session(take(body, "session_id", str))
    return CreateModel(
        model_id=f"{session.session_id}:train:{take(body, 'model_seq_id', int)}",
        session_id=session.session_id,
        base_model=base_model,
        lora=wire.lora_spec(lora),
        user_metadata={**session.user_metadata, **take(body, "user_metadata", dict, {})},
    )


async def _get_info(request: Request, service: Service) -> Response:
    run = await service.run(take(await bodies.read_json(request), "model_id", str))
    return JSONResponse(
        {
            "type": "get_info",
            "model_id": run.model_id,
            "model_name": run.base_model,
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "model_data": {
                "arch": service.served.architecture,
                "model_name": run.base_model,
                "tokenizer_id": service.served.tokenizer_folder,
            },
        }
    )


async def _unload_model(request: Request, service: Service) -> Response:
    model_id = take(await bodies.read_json(request), "model_id", str)
    await service.run(model_id)
    return bodies.future(service.submit(f"{model_id}:unload", UnloadModel(model_id)), model_id)


async def _forward_backward(request: Request, service: Service) -> Response:
    return await _pass(request, service, forward_only=False)


async def _forward(request: Request, service: Service) -> Response:
    return await _pass(request, service, forward_only=True)


async def _pass(request: Request, service: Service, *, forward_only: bool) -> Response:
    content_type = request.headers.get("content-type", "")
    body = wire.forward_backward(await bodies.read(request), content_type, forward_only=forward_only)
    await service.run(body.operation.model_id)
    ticket = _training_ticket(body.operation.model_id, body.seq_id)
    return bodies.future(service.submit(ticket, body.operation), body.operation.model_id)


async def _optim_step(request: Request, service: Service) -> Response:
    body = await bodies.read_json(request)
    operation = wire.optim_step(body)
    await service.run(operation.model_id)
    return _queued(service, body, operation)


def _queued(service: Service, body: Json, operation: OptimStep | SaveState | SaveForSampler | SaveExternal) -> Response:
    ticket = _training_ticket(operation.model_id, take(body, "seq_id", int, None))
    return bodies.future(service.submit(ticket, operation), operation.model_id)


def _training_ticket(model_id: str, seq_id: int | None) -> str:
    """Return the ticket of a run's request: a request sent twice has the same one, so it runs once."""
    return f"{model_id}:{seq_id if seq_id is not None else secrets.token_hex(8)}"


async def _save_weights(request: Request, service: Service) -> Response:
    body = await bodies.read_json(request)
    model_id, name = take(body, "model_id", str), take(body, "path", str, None)
    name = name or f"state-{secrets.token_hex(4)}"
    check_name(name)
    await service.run(model_id)
    operation = SaveState(
        model_id,
        name,
        overwrite=take(body, "overwrite", bool, False),
        ttl_seconds=_ttl_seconds(body),
        user_metadata=take(body, "user_metadata", dict, None),
    )
    return _queued(service, body, operation)


async def _save_weights_for_sampler(request: Request, service: Service) -> Response:
    body = await bodies.read_json(request)
    model_id, name = take(body, "model_id", str), take(body, "path", str, None)
    if name is not None:
        check_name(name)
    run = await service.run(model_id)
    number = take(body, "sampling_session_seq_id", int, None)
    operation = SaveForSampler(
        model_id,
        name,
        sampler_id=None if number is None else sampler_id_of(run.session_id, number),
        ttl_seconds=_ttl_seconds(body),
        user_metadata=take(body, "user_metadata", dict, None),
    )
    return _queued(service, body, operation)


async def _save_weights_external(request: Request, service: Service) -> Response:
    body = await bodies.read_json(request)
    model_id, name = take(body, "model_id", str), take(body, "path", str)
    check_name(name)
    recipients = exports.check_recipients(take(body, "age_encryption_recipients", list, []))
    await service.run(model_id)
    operation = SaveExternal(model_id, name, recipients, ttl_seconds=_ttl_seconds(body))
    return _queued(service, body, operation)


def _ttl_seconds(body: Json) -> int | None:
    seconds: int | None = take(body, "ttl_seconds", int, None)
    expiry(seconds)  # told now rather than by a future
    return seconds


async def _load_weights(request: Request, service: Service) -> Response:
    body = await bodies.read_json(request)
    path, with_optimizer = take(body, "path", str), take(body, "optimizer", bool)
    checkpoint = await service.blocking(service.store.checkpoint, path)
    model_id, create = take(body, "model_id", str, None), None
    if model_id is None:
        lora = {**checkpoint.lora.__dict__}
        create = await _new_model(body, service, lora, take(body, "base_model", str, checkpoint.base_model))
        model_id = create.model_id
    else:
        await service.run(model_id)
    ticket = f"{model_id}:create" if create else _training_ticket(model_id, take(body, "seq_id", int, None))
    return bodies.future(service.submit(ticket, LoadState(model_id, path, with_optimizer, create)), model_id)


HANDLERS: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/api/v1/create_model", _create_model),
    ("POST", "/api/v1/get_info", _get_info),
    ("POST", "/api/v1/unload_model", _unload_model),
    ("POST", "/api/v1/forward_backward", _forward_backward),
    ("POST", "/api/v1/forward", _forward),
    ("POST", "/api/v1/optim_step", _optim_step),
    ("POST", "/api/v1/save_weights", _save_weights),
    ("POST", "/api/v1/save_weights_for_sampler", _save_weights_for_sampler),
    ("POST", "/api/v1/save_weights_external", _save_weights_external),
    ("POST", "/api/v1/load_weights", _load_weights),
)
