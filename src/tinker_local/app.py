"""The HTTP application: what the SDK's service, training and sampling clients call."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tinker_local import answers, bodies, exports, rest, runs, wire
from tinker_local.checkpoints import SamplerRecord, now
from tinker_local.errors import GoneError, InvalidRequestError, NotServedError, ServiceError
from tinker_local.service import Service, sampler_id_of
from tinker_local.wire import take

_POLL_SECONDS = 25.0  # the SDK gives up on a poll after 45
_CLONE_SEQ_IDS = 1_000_000_000  # each client of a sampler numbers its requests in a block of this size
_PROTOBUF = "application/x-protobuf"
_SDK_AGENT = "AsyncTinker/"

Handler = Callable[[Request, Service], Awaitable[Response]]


async def _healthz(request: Request, service: Service) -> Response:
    if service.death is not None:
        raise service.death
    return JSONResponse({"status": "ok"})


async def _client_config(request: Request, service: Service) -> Response:
    # Chunks one after the other arrive in the order of their seq_ids, which is the order they must run in. A sample
    # that is asked for by itself is sent again after a restart; in a batch of futures it would wait for ever.
    return JSONResponse(
        {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": False,
            "proto_compress_fwdbwd": False,
            "sample_join_sampling_session": True,
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False,
            "use_pyqwest_transport": False,
        }
    )


async def _dynamic_config(request: Request, service: Service) -> Response:
    return JSONResponse({"refresh_interval_sec": 300, "sample_cancel_enabled": True})


async def _capabilities(request: Request, service: Service) -> Response:
    models = [
        {
            "model_name": name,
            "max_context_length": service.served.context_length,
            "trainable": True,
            "sampleable": True,
        }
        for name in service.served.names
    ]
    return JSONResponse({"supported_models": models})


async def _create_session(request: Request, service: Service) -> Response:
    body = await bodies.read_json(request)
    metadata, name = take(body, "user_metadata", dict, {}), take(body, "display_name", str, None)
    return JSONResponse({"type": "create_session", "session_id": await service.open_session(metadata, name)})


async def _heartbeat(request: Request, service: Service) -> Response:
    body = await bodies.read_json(request)
    try:
        await service.session(take(body, "session_id", str))
    except GoneError as error:
        return JSONResponse({"detail": str(error)}, status_code=410)  # tells the SDK to stop its heartbeats
    return JSONResponse({"type": "session_heartbeat"})


async def _telemetry(request: Request, service: Service) -> Response:
    await bodies.read(request)
    return JSONResponse({"status": "accepted"})


async def _create_sampling_session(request: Request, service: Service) -> Response:
    body = await bodies.read_json(request)
    session = await service.session(take(body, "session_id", str))
    sampler_id = sampler_id_of(session.session_id, take(body, "sampling_session_seq_id", int))
    base_model, path = take(body, "base_model", str, None), take(body, "model_path", str, None)
    await service.add_sampler(await _sampler_record(service, sampler_id, session.session_id, base_model, path))
    return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})


async def _sampler_record(
    service: Service, sampler_id: str, session_id: str, base_model: str | None, path: str | None
) -> SamplerRecord:
    if path is None:
        if base_model is None:
            raise InvalidRequestError("give a base_model or a model_path to sample from")
        service.check_model(base_model)
        return SamplerRecord(sampler_id, session_id, base_model, created=now())
    checkpoint = await service.blocking(service.store.checkpoint, path)
    if checkpoint.kind != "sampler_weights":
        raise InvalidRequestError(
            f"{path} can't be sampled from: give weights saved for that (tinker://RUN/sampler_weights/NAME)"
        )
    service.check_model(checkpoint.base_model)
    return SamplerRecord(sampler_id, session_id, checkpoint.base_model, path, created=now())


async def _join_sampling_session(request: Request, service: Service) -> Response:
    sampler_id = take(await bodies.read_json(request), "sampling_session_id", str)
    await service.blocking(service.store.sampler, sampler_id)
    return JSONResponse({"type": "join_sampling_session", "client_counter": service.join_sampler(sampler_id)})


async def _asample(request: Request, service: Service) -> Response:
    body = await bodies.read_json(request)
    sampler_id = take(body, "sampling_session_id", str, None)
    if sampler_id is None:
        sampler_id = f"adhoc:{secrets.token_hex(8)}"
        base_model, path = take(body, "base_model", str, None), take(body, "model_path", str, None)
        await service.add_sampler(await _sampler_record(service, sampler_id, "", base_model, path))
    else:
        await service.blocking(service.store.sampler, sampler_id)
    operation = wire.sample(body, sampler_id)
    seq_id = take(body, "seq_id", int, None)
    ticket = f"{sampler_id}:{seq_id if seq_id is not None else secrets.token_hex(8)}"
    service.submit(ticket, operation)
    sequence_ids = [f"{ticket}:{index}" for index in range(operation.num_samples)]
    return JSONResponse({"request_id": ticket, "sample_sequence_ids": sequence_ids})


def _future(ticket: str, model_id: str) -> Response:
    return JSONResponse({"request_id": ticket, "model_id": model_id})


async def _retrieve_future(request: Request, service: Service) -> Response:
    ticket = take(await bodies.read_json(request), "request_id", str)
    try:
        outcome = await service.futures.wait(ticket, seconds=_POLL_SECONDS)
    except KeyError:
        # 410 makes the SDK sample again; a training request may have changed weights, so its client must decide.
        sampled = request.headers.get("x-tinker-request-type") == "Sample"
        message = f"request {ticket!r} is not known here: the service was restarted or its answer is too old"
        return JSONResponse({"detail": message}, status_code=410 if sampled else 404)
    if outcome is None:
        waiting = {"type": "try_again", "request_id": ticket, "queue_state": "active"}
        return JSONResponse(waiting, status_code=408)
    if isinstance(outcome, ServiceError):
        return JSONResponse(answers.failure(outcome))
    if _PROTOBUF in request.headers.get("accept", ""):
        encoded = answers.to_proto(outcome)
        if encoded is not None:
            return Response(encoded, media_type=_PROTOBUF)
    return JSONResponse(answers.to_json(outcome))


async def _retrieve_futures(request: Request, service: Service) -> Response:
    """Tell which sample requests of one client of a sampler are through since its last poll."""
    body = await bodies.read_json(request)
    target = take(body, "target", dict)
    sampler_id, clone = take(target, "sampling_session_id", str), take(target, "cloned_sampler_id", int, 0)
    since, seconds = take(body, "prev_cursor", int, 0), take(body, "timeout", (int, float), _POLL_SECONDS)

    def wanted(ticket: str) -> bool:
        prefix, _, number = ticket.rpartition(":")
        return prefix == sampler_id and number.isdigit() and int(number) // _CLONE_SEQ_IDS == clone

    found = await service.futures.finished_since(since, wanted, seconds=min(max(seconds, 0), _POLL_SECONDS))
    completions = [{"state": "finished" if ok else "failed", "request_id": ticket} for _, ticket, ok in found]
    return JSONResponse({"completions": completions, "cursor": max([since, *(number for number, _, _ in found)])})


async def _cancel_future(request: Request, service: Service) -> Response:
    service.cancel(take(await bodies.read_json(request), "request_id", str))
    return Response(status_code=204)


async def _tokenizer(request: Request, service: Service) -> Response:
    service.check_model(request.query_params.get("model", service.served.names[0]))
    return JSONResponse({"files": dict(service.served.tokenizer_files)})


async def _not_served(request: Request, service: Service) -> Response:
    error = NotServedError(f"{request.method} {request.url.path} is not served here; see docs/tinker-local.md")
    # The SDK tries any 5xx again for five minutes, whatever the headers say: to its caller that is a hang.
    from_sdk = request.headers.get("user-agent", "").startswith(_SDK_AGENT)
    return _error(error, status=404 if from_sdk else error.status)


_HANDLERS: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/api/v1/healthz", _healthz),
    ("POST", "/api/v1/client/config", _client_config),
    ("POST", "/api/v1/client/dynamic_config", _dynamic_config),
    ("GET", "/api/v1/get_server_capabilities", _capabilities),
    ("POST", "/api/v1/create_session", _create_session),
    ("POST", "/api/v1/session_heartbeat", _heartbeat),
    ("POST", "/api/v1/telemetry", _telemetry),
    ("POST", "/api/v1/create_sampling_session", _create_sampling_session),
    ("POST", "/api/v1/join_sampling_session", _join_sampling_session),
    ("POST", "/api/v1/asample", _asample),
    ("POST", "/api/v1/retrieve_future", _retrieve_future),
    ("POST", "/api/v1/retrieve_futures", _retrieve_futures),
    ("POST", "/api/v1/cancel_future", _cancel_future),
    ("GET", "/local/v1/tokenizer", _tokenizer),
    *runs.HANDLERS,
    *rest.HANDLERS,
)


def make_app(service: Service) -> Starlette:
    """Return the application; starting it starts the service, stopping it is up to whoever runs it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield

    routes = [Route(path, _endpoint(handler, service), methods=[method]) for method, path, handler in _HANDLERS]
    methods = ["GET", "POST", "PUT", "DELETE"]
    routes.append(Route("/{path:path}", _endpoint(_not_served, service), methods=methods))
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})
    app.add_middleware(_KeyCheck, service=service)
    return app


def _endpoint(handler: Handler, service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request, service)
        except ServiceError as error:
            return _error(error)

    return endpoint


def _error(error: ServiceError, *, status: int | None = None) -> Response:
    # The header keeps the SDK's transport from trying again within one of its own tries.
    return JSONResponse({"detail": str(error)}, status or error.status, headers={"x-should-retry": "false"})


async def _http_error(request: Request, error: Any) -> Response:
    return JSONResponse({"detail": str(error.detail)}, status_code=error.status_code)


def _open(path: str) -> bool:
    """Tell whether a path needs no key: the address of a file is its own permission."""
    return path == "/api/v1/healthz" or path.startswith(exports.FILES_PATH)


class _KeyCheck:
    """Refuses requests without an accepted key, before their bodies are read."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _open(scope["path"]):
            headers = dict(scope["headers"])
            bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            try:
                self._service.check_key(headers.get(b"x-api-key", bearer).decode("latin-1"))
            except ServiceError as error:
                await _error(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
