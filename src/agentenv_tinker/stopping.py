"""Ctrl-C once stops a command after everything is torn down; twice, at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

from agentenv_tinker.progress import Say

_Result = TypeVar("_Result")
_INTERRUPTED = 130  # as shells count an end by SIGINT
_LEFT = "agentenv-tinker: left at once; what it was running goes at the next start, or with the sandbox host\n"


@contextlib.contextmanager
def sigint_restored() -> Iterator[None]:
    """Put the handler of SIGINT back after the block, whatever `stoppable` set meanwhile."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def stoppable(command: Coroutine[Any, Any, _Result], say: Say) -> _Result:
    """Run `command`, which the first SIGINT cancels. From the second one on the process exits with code 130 at once.

    For the main thread. The handler stays after the command, for a teardown of the loop that takes long.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    interrupted = False

    def stop() -> None:
        say("stopping; Ctrl-C again leaves at once")
        task.cancel()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _LEFT.encode())
            os._exit(_INTERRUPTED)  # no thread, task or handler is waited for
        interrupted = True
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop)

    signal.signal(signal.SIGINT, interrupt)
    return await command
