"""Finds the Tinker service of a run: the one the environment names, or a private tinker_local on this machine.

The two meet over HTTP alone: tinker_local runs as a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import tinker
from tinker.lib.base_url import resolve_base_url

from agentenv_tinker.answering import answering
from agentenv_tinker.errors import ServiceError, described

LOCAL_KEY = "tml-local"
_START_SECONDS = 600.0  # a first start converts the default model, about 40 s
_ANSWER_SECONDS = 60.0
_STOP_SECONDS = 15.0
_TRIES, _TRIES_OF_OURS = 30, 6  # as long as the SDK tries a request again, 5 min; nobody starts our own again


@dataclass(frozen=True)
class Service:
    """A Tinker service that answers and has the run's model."""

    url: str | None
    """Its address, or None for the hosted one."""
    tokenizer_path: str | None
    """A folder with the model's tokenizer, where the service gives it out; None to find it by the model's name."""
    ours: bool
    """Whether it was started for this run alone."""

    def answering(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Raise TrainingError in the block once the service has stopped answering."""
        tries = _TRIES_OF_OURS if self.ours else _TRIES
        return answering(resolve_base_url(self.url), _named(self.url), tries=tries)


@contextlib.asynccontextmanager
async def tinker_service(model: str, *, folder: Path) -> AsyncIterator[Service]:
    """The run's service, which is ready to train `model`. Files of the run's own go below `folder`, and a
    tinker_local's weights beside it, where later runs find them.

    TINKER_BASE_URL names a service, TINKER_API_KEY alone the hosted one; with neither, a tinker_local starts for the
    length of the block. Raises ServiceError where it can't be reached, refuses the key or doesn't have the model.
    """
    async with contextlib.AsyncExitStack() as stack:
        url = os.environ.get("TINKER_BASE_URL")
        ours = url is None and not os.environ.get("TINKER_API_KEY")
        if ours:
            url = await stack.enter_async_context(_local_service(model, folder))
            stack.enter_context(_environment(TINKER_BASE_URL=url, TINKER_API_KEY=LOCAL_KEY))
        await _check_model(model, url)
        yield Service(url, await _fetch_tokenizer(model, url, folder / "tokenizer"), ours)


@contextlib.asynccontextmanager
async def _local_service(model: str, folder: Path) -> AsyncIterator[str]:
    """A tinker_local for this block, on a free port: its log in `folder`, its data beside it, for all runs to share."""
    log = folder / "tinker_local.log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tinker_local", "--model", model, "--port", "0", "--until-eof"),
            *("--data", str(folder.parent / ".tinker")),
            stdin=asyncio.subprocess.PIPE,  # closed when this process dies, however it does
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            start_new_session=True,  # a Ctrl-C is ours to handle: the service is needed to the end
        )
        try:
            yield await _served_at(process, log)
        finally:
            await _stopped(process)


async def _served_at(process: asyncio.subprocess.Process, log: Path) -> str:
    """The address in the line that tinker_local prints once it answers."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_SECONDS):
            async for line in process.stdout:
                _, serving, address = line.decode().rpartition(" at ")
                if serving and address.startswith("http"):
                    return address.strip()
    except TimeoutError:
        raise ServiceError(f"tinker_local did not start within {_START_SECONDS:g} s; see {log}") from None
    said = (await asyncio.to_thread(log.read_text, errors="replace")).strip().splitlines()
    raise ServiceError(said[-1] if said else "tinker_local stopped as it started, and said nothing")


async def _stopped(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables, which spawned workers inherit, for the length of the block."""
    known = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in known.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _named(url: str | None) -> str:
    return f"the Tinker service at {url}" if url else "Tinker"


async def _check_model(model: str, url: str | None) -> None:
    where = _named(url)
    if url is not None:
        await _check_reachable(url, where)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            client = await asyncio.to_thread(tinker.ServiceClient)
            capabilities = await asyncio.to_thread(client.get_server_capabilities)
    except TimeoutError:
        raise ServiceError(f"{where} did not answer within {_ANSWER_SECONDS:g} s") from None
    except (tinker.AuthenticationError, tinker.PermissionDeniedError) as error:
        raise ServiceError(f"{where} refuses the key in TINKER_API_KEY: {described(error)}") from error
    except (tinker.TinkerError, ValueError) as error:
        raise ServiceError(f"{where} can't be used: {described(error)}") from error
    names = [known.model_name for known in capabilities.supported_models if known.model_name]
    if model not in names:
        raise ServiceError(f"{where} has no model {model!r}; it has {', '.join(map(repr, sorted(names)))}")


async def _check_reachable(url: str, where: str) -> None:
    """Ask for its health without the SDK, which goes on trying a service that isn't there."""
    try:
        async with httpx.AsyncClient(timeout=10) as client:
            (await client.get(f"{url.rstrip('/')}/api/v1/healthz")).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServiceError(f"{where} does not answer ({described(error)}); is TINKER_BASE_URL right?") from error


async def _fetch_tokenizer(model: str, url: str | None, folder: Path) -> str | None:
    """The model's tokenizer, saved to `folder`, where the service is a tinker_local; None where it isn't."""
    if url is None:
        return None
    key = os.environ.get("TINKER_API_KEY", "")
    async with httpx.AsyncClient(timeout=_ANSWER_SECONDS, headers={"X-API-Key": key}) as client:
        answer = await client.get(f"{url.rstrip('/')}/local/v1/tokenizer", params={"model": model})
    if answer.status_code == 404:
        return None
    if answer.is_error:
        raise ServiceError(f"the Tinker service at {url} gave no tokenizer for {model!r}: {answer.text}")
    await asyncio.to_thread(_save_files, folder, answer.json()["files"])
    return str(folder)


def _save_files(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / Path(name).name).write_text(text)
