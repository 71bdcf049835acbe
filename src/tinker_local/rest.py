"""What the SDK's RestClient calls: runs, checkpoints, sessions and samplers, as they lie on disk."""

import io
import tarfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response

from tinker_local import bodies, exports
from tinker_local.checkpoints import Checkpoint, Kind, Run, Store, expiry, now
from tinker_local.errors import InvalidRequestError, NotFoundError
from tinker_local.service import Service
from tinker_local.wire import take

Handler = Callable[[Request, Service], Awaitable[Response]]

_TYPES: Mapping[Kind, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def _checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": checkpoint.created,
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": checkpoint.expires,
    }


def _run_json(run: Run, store: Store) -> dict[str, Any]:
    checkpoints = store.checkpoints(run.model_id)
    last: dict[str, Checkpoint] = {checkpoint.kind: checkpoint for checkpoint in checkpoints}
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": "local",
        "is_lora": True,
        "lora_rank": run.lora.rank,
        "corrupted": False,
        "last_request_time": checkpoints[-1].created if checkpoints else run.created,
        "last_checkpoint": _checkpoint_json(last["weights"]) if "weights" in last else None,
        "last_sampler_checkpoint": _checkpoint_json(last["sampler_weights"]) if "sampler_weights" in last else None,
        "user_metadata": {key: str(value) for key, value in run.user_metadata.items()},
    }


def _page(request: Request) -> tuple[int, int]:
    try:
        limit, offset = (int(request.query_params.get(key, default)) for key, default in (("limit", 20), ("offset", 0)))
    except ValueError as error:
        raise InvalidRequestError("limit and offset must be whole numbers") from error
    if limit < 0 or offset < 0:
        raise InvalidRequestError(f"limit and offset must be 0 or more, not {limit} and {offset}")
    return limit, offset


async def _training_runs(request: Request, service: Service) -> Response:
    limit, offset = _page(request)

    def read() -> tuple[int, list[dict[str, Any]]]:
        runs = service.store.runs()
        return len(runs), [_run_json(run, service.store) for run in runs[offset : offset + limit]]

    total, found = await service.blocking(read)
    cursor = {"offset": offset, "limit": limit, "total_count": total}
    return JSONResponse({"training_runs": found, "cursor": cursor})


async def _training_run(request: Request, service: Service) -> Response:
    run = await service.run(request.path_params["run"])
    return JSONResponse(await service.blocking(_run_json, run, service.store))


async def _run_checkpoints(request: Request, service: Service) -> Response:
    found = await service.blocking(service.store.checkpoints, request.path_params["run"])
    return JSONResponse({"checkpoints": [_checkpoint_json(checkpoint) for checkpoint in found]})


async def _all_checkpoints(request: Request, service: Service) -> Response:
    limit, offset = _page(request)
    found = list(reversed(await service.blocking(service.store.checkpoints)))
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    page = [_checkpoint_json(checkpoint) for checkpoint in found[offset : offset + limit]]
    return JSONResponse({"checkpoints": page, "cursor": cursor})


def _path(request: Request) -> str:
    return f"tinker://{request.path_params['run']}/{request.path_params['kind']}/{request.path_params['name']}"


async def _delete_checkpoint(request: Request, service: Service) -> Response:
    await service.blocking(service.store.delete_checkpoint, _path(request))
    return Response(status_code=204)


async def _set_ttl(request: Request, service: Service) -> Response:
    seconds = take(await bodies.read_json(request), "ttl_seconds", int, None)
    checkpoint = await service.blocking(service.store.checkpoint, _path(request))
    await service.blocking(service.store.update_checkpoint, replace(checkpoint, expires=expiry(seconds)))
    return Response(status_code=204)


async def _archive(request: Request, service: Service) -> Response:
    """Send the client on to the archive itself: the SDK takes the redirect's target for a signed URL."""
    path = _path(request)
    await service.blocking(service.store.checkpoint, path)
    urls, expires = service.addresses.sign(str(request.base_url), path, [_ARCHIVE])
    return RedirectResponse(urls[_ARCHIVE], 302, headers={"Expires": formatdate(expires, usegmt=True)})


async def _external_weights_urls(request: Request, service: Service) -> Response:
    path = _path(request)
    files = await service.blocking(service.store.adapter_files, path)
    urls, expires = service.addresses.sign(str(request.base_url), path, [file.name for file in files])
    return JSONResponse({"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()})


async def _file(request: Request, service: Service) -> Response:
    """Answer a signed address; it needs no key."""
    path, name = _path(request), request.path_params["file"]
    query = request.query_params
    place = f"{path.removeprefix('tinker://')}/{name}"
    service.addresses.check(place, query.get("expires", ""), query.get("signature", ""))
    files = await service.blocking(service.store.adapter_files, path)
    if name == _ARCHIVE:
        return Response(await service.blocking(_tar, files), media_type="application/x-tar")
    for file in files:
        if file.name == name:
            return FileResponse(file, media_type="application/octet-stream")
    raise NotFoundError(f"{path} has no file {name!r}")


def _tar(files: list[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in files:
            archive.add(file, arcname=file.name)
    return buffer.getvalue()


async def _weights_info(request: Request, service: Service) -> Response:
    path = take(await bodies.read_json(request), "tinker_path", str)
    checkpoint = await service.blocking(service.store.checkpoint, path)
    return JSONResponse(
        {
            "base_model": checkpoint.base_model,
            "is_lora": True,
            "lora_rank": checkpoint.lora.rank,
            "train_unembed": checkpoint.lora.train_unembed,
            "train_mlp": checkpoint.lora.train_mlp,
            "train_attn": checkpoint.lora.train_attn,
        }
    )


async def _sampler(request: Request, service: Service) -> Response:
    found = await service.blocking(service.store.sampler, request.path_params["sampler"])
    return JSONResponse(
        {"sampler_id": found.sampler_id, "base_model": found.base_model, "model_path": found.model_path}
    )


async def _sessions(request: Request, service: Service) -> Response:
    limit, offset = _page(request)
    found = await service.blocking(service.store.sessions)
    return JSONResponse({"sessions": [session.session_id for session in found[offset : offset + limit]]})


async def _session(request: Request, service: Service) -> Response:
    def read() -> dict[str, Any]:
        session = service.store.session(request.path_params["session"])
        runs = [run.model_id for run in service.store.runs() if run.session_id == session.session_id]
        samplers = [entry.sampler_id for entry in service.store.samplers() if entry.session_id == session.session_id]
        metadata = {key: str(value) for key, value in session.user_metadata.items()}
        return {
            "training_run_ids": runs,
            "sampler_ids": samplers,
            "user_metadata": metadata,
            "display_name": session.display_name,
        }

    return JSONResponse(await service.blocking(read))


async def _finish_session(request: Request, service: Service) -> Response:
    body = await bodies.read_json(request)
    reason = str(take(body, "reason", dict, {}).get("type", "success"))
    await service.finish_session(request.path_params["session"], f"{reason} {now()}")
    return Response(status_code=204)


_ARCHIVE = "adapter.tar"
_CHECKPOINT = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"

HANDLERS: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/api/v1/training_runs", _training_runs),
    ("GET", "/api/v1/training_runs/{run}", _training_run),
    ("GET", "/api/v1/training_runs/{run}/checkpoints", _run_checkpoints),
    ("DELETE", _CHECKPOINT, _delete_checkpoint),
    ("PUT", f"{_CHECKPOINT}/ttl", _set_ttl),
    ("GET", f"{_CHECKPOINT}/archive", _archive),
    ("GET", f"{_CHECKPOINT}/external_weights_urls", _external_weights_urls),
    ("GET", exports.FILES_PATH + "{run}/{kind}/{name}/{file}", _file),
    ("GET", "/api/v1/checkpoints", _all_checkpoints),
    ("POST", "/api/v1/weights_info", _weights_info),
    ("GET", "/api/v1/samplers/{sampler}", _sampler),
    ("GET", "/api/v1/sessions", _sessions),
    ("GET", "/api/v1/sessions/{session}", _session),
    ("POST", "/api/v1/sessions/{session}/finish", _finish_session),
)
