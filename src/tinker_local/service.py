"""The service between HTTP and the worker: names, sessions and tickets. Belongs to the event loop."""

import asyncio
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tinker_local.checkpoints import Run, SamplerRecord, SessionRecord, Store, now
from tinker_local.errors import GoneError, NotFoundError, ServiceError, UnauthorizedError
from tinker_local.exports import Addresses
from tinker_local.futures import Futures
from tinker_local.operations import Result, Sample, Training
from tinker_local.worker import Backend, Worker

T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """The model that is served, as clients may ask about it."""

    names: tuple[str, ...]  # its name, then the others it answers to
    architecture: str
    context_length: int
    tokenizer_files: Mapping[str, str]
    tokenizer_folder: str  # where those files lie on this machine


def sampler_id_of(session_id: str, number: int) -> str:
    """Return the id of a session's sampler of that number."""
    return f"{session_id}:sample:{number}"


class Service:
    """Everything the HTTP handlers need."""

    def __init__(self, served: Served, store: Store, backend: Backend, *, key: str | None) -> None:
        self.served = served
        self.store = store
        self.futures = Futures()
        self.addresses = Addresses()
        self._key = key
        self._worker = Worker(backend, self._deliver, self._died)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clones: dict[str, int] = {}

    def start(self) -> None:
        """Start the worker, from the event loop that the service belongs to."""
        self._loop = asyncio.get_running_loop()
        self._worker.start()

    def release(self) -> None:
        """Answer everything that clients wait for, because the service is being stopped."""
        self.futures.fail_all(ServiceError("the service is being stopped"))

    def stop(self, *, timeout: float) -> bool:
        """Stop the worker and tell whether it stopped within `timeout` seconds."""
        return self._worker.stop(timeout=timeout)

    @property
    def death(self) -> ServiceError | None:
        """Why nothing can run any more, if that is so."""
        return self._worker.death

    def check_key(self, key: str) -> None:
        """Raise UnauthorizedError unless this service accepts the key."""
        if self._key is not None:
            if not hmac.compare_digest(key.encode(), self._key.encode()):
                raise UnauthorizedError(
                    "the API key is not the one this service was started with (TINKER_LOCAL_API_KEY)"
                )
        elif not key.startswith("tml-"):
            raise UnauthorizedError("give an API key that starts with 'tml-' (TINKER_API_KEY=tml-local will do)")

    def check_model(self, name: str) -> None:
        """Raise NotFoundError unless the name is the served model's."""
        if name not in (*self.served.names, self.served.tokenizer_folder):
            raise NotFoundError(f"unknown model {name!r}: this service serves {self.served.names[0]!r}")

    def submit(self, ticket: str, operation: Training | Sample) -> str:
        """Hand an operation to the worker under that ticket; one that is known already is not handed over again.

        Raises WorkerDiedError if nothing can run any more.
        """
        if ticket not in self.futures:
            self.futures.open(ticket)
            try:
                self._worker.submit(ticket, operation)
            except ServiceError as error:
                self.futures.finish(ticket, error)
                raise
        return ticket

    def cancel(self, ticket: str) -> None:
        """Give up on a sample request."""
        self._worker.cancel(ticket)
        self.futures.finish(ticket, ServiceError("the request was cancelled by its client"))

    async def run(self, model_id: str) -> Run:
        """Return a training run; raises NotFoundError if there is none of that id."""
        return await self.blocking(self.store.run, model_id)

    async def open_session(self, user_metadata: Mapping[str, Any], display_name: str | None) -> str:
        """Record a new session and return its id."""
        session = SessionRecord(secrets.token_hex(16), now(), dict(user_metadata), display_name)
        await self.blocking(self.store.put_session, session)
        return session.session_id

    async def session(self, session_id: str) -> SessionRecord:
        """Return a session that is not finished.

        Raises NotFoundError if there is none of that id, GoneError if its client has finished it.
        """
        session = await self.blocking(self.store.session, session_id)
        if session.finished is not None:
            raise GoneError(f"session {session_id!r} is finished: open another one")
        return session

    async def finish_session(self, session_id: str, reason: str) -> None:
        """Record that a session's client is done; the first reason counts."""
        session = await self.blocking(self.store.session, session_id)
        if session.finished is None:
            await self.blocking(self.store.put_session, replace(session, finished=reason))

    async def add_sampler(self, sampler: SamplerRecord) -> None:
        """Record a sampler."""
        await self.blocking(self.store.add_sampler, sampler)

    def join_sampler(self, sampler_id: str) -> int:
        """Return a number that no other client of that sampler has; the first client's is 0."""
        # Clients of before a restart keep theirs, so numbers start anew at random.
        self._clones[sampler_id] = self._clones.get(sampler_id, secrets.randbelow(1 << 28)) + 1
        return self._clones[sampler_id]

    async def blocking(self, call: Callable[..., T], *args: Any) -> T:
        """Run a call that reads or writes the disk, off the event loop."""
        return await asyncio.to_thread(call, *args)

    def _deliver(self, ticket: str, outcome: Result | ServiceError) -> None:
        self._on_loop(self.futures.finish, ticket, outcome)

    def _died(self, error: ServiceError) -> None:
        self._on_loop(self.futures.fail_all, error)

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)
