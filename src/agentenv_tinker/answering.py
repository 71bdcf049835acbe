"""Ends a command whose Tinker service has stopped answering.

The SDK does not: it asks again for a training request's result without end, and for a sample's for two hours; where it
opens or closes a session, as the cookbook does since 0.6 when a run ends, it holds up the event loop for minutes. So a
thread asks for the service's health, and once none comes it drops what the SDK waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable

import httpx
from tinker.lib import internal_client_holder

from agentenv_tinker.errors import TrainingError

_ASK_SECONDS = 10.0  # from one try to the next, and the longest that one takes
_DROP_SECONDS = 0.2


@contextlib.asynccontextmanager
async def answering(url: str, where: str, *, tries: int, every: float = _ASK_SECONDS) -> AsyncIterator[None]:
    """Raise TrainingError, naming the service as `where`, in the block once the service at `url` has not answered
    `tries` times in a row, `every` seconds apart."""
    loop, deadline = asyncio.get_running_loop(), asyncio.timeout(None)
    silent, over = threading.Event(), threading.Event()

    def give_up() -> None:
        silent.set()
        loop.call_soon_threadsafe(_expire, deadline)

    threading.Thread(target=_watch, args=(url, tries, every, give_up, over), daemon=True).start()
    try:
        async with deadline:
            yield
    except (Exception, asyncio.CancelledError) as error:
        if not silent.is_set():
            raise
        raise TrainingError(f"{where} has not answered for {tries * every:g} s") from error
    finally:
        over.set()


def _expire(deadline: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # the block has just ended
        deadline.reschedule(asyncio.get_running_loop().time())


def _watch(url: str, tries: int, every: float, give_up: Callable[[], None], over: threading.Event) -> None:
    """Ask until the block is over. Tries are counted, not seconds: a process that was suspended has lost none."""
    failed, wait = 0, every
    with httpx.Client(timeout=_ASK_SECONDS) as client:
        while not over.wait(wait):
            began = time.monotonic()
            failed = 0 if _answers(client, url) else failed + 1
            if failed == tries:
                break
            wait = max(0.0, every - (time.monotonic() - began))
    if failed == tries:
        give_up()
        _drop_calls(over)


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return not client.get(f"{url.rstrip('/')}/api/v1/healthz").is_server_error
    except httpx.HTTPError:
        return False


def _drop_calls(over: threading.Event) -> None:
    """Cancel what the SDK waits for, on the event loop that all its clients share, until the block is over: one call
    that ends may make room for another, such as that which tells the service of the end."""
    calls = internal_client_holder._internal_client_holder_thread_singleton.get_loop()
    while not over.wait(_DROP_SECONDS):
        calls.call_soon_threadsafe(_cancel_all, calls)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
