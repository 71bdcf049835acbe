"""Two places where the framework works or waits for nothing, changed in this process: an episode costs and takes less.

What an episode does and scores is the same with them and without.
"""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from typing import Any, cast

from agent_env.a2a_agent import protocol
from agent_env.config import loader
from agent_env.task import EpisodeSpec
from agent_env.task.episode import Episode

_unheeding = protocol.poll_a2a_task
_looking_up = loader._missing_extra
_found: dict[str, str | None] = {}


def take() -> None:
    """Put both changes in place. Again does no harm."""
    protocol.poll_a2a_task = _poll  # type: ignore[assignment]
    loader._missing_extra = _missing_extra


def _missing_extra(error: ImportError) -> str | None:
    """Which extra a provider's missing module is of, looked up once: for every URL of an episode the framework tries to
    load each provider that there is, and the words that it then drops take it 10 ms a provider."""
    if str(error) not in _found:
        _found[str(error)] = _looking_up(error)
    return _found[str(error)]


class TurnEnds:
    """Tells an episode's prompts at once that a turn of it was ended, which they else find out at their next poll."""

    _of_episode: ContextVar[TurnEnds | None] = ContextVar("_of_episode", default=None)

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def start(self, spec: EpisodeSpec, *, sandbox: str | None) -> Episode:
        """Start an episode whose prompts hear of it."""
        token = self._of_episode.set(self)
        try:
            return await spec.start(sandbox=sandbox)
        finally:
            self._of_episode.reset(token)

    def tell(self) -> None:
        """Have the prompts look now."""
        told, self._ended = self._ended, asyncio.Event()
        told.set()

    async def next(self) -> None:
        """Return once a turn was ended."""
        await self._ended.wait()


class _Growing:
    """Seconds between polls: few at first and twice as many each time, until `most`."""

    def __init__(self, most: float) -> None:
        self._next, self._most = 0.01, most

    def __add__(self, more: float) -> float:
        now, self._next = self._next, min(2 * self._next, self._most)
        return now + more


async def _poll(a2a_url: str, task_id: str, seconds: int, interval: float = 10, **options: Any) -> Any:
    """The framework's poll, joined by one that asks often at first as soon as a turn of the episode is ended."""
    ends = TurnEnds._of_episode.get()
    if ends is None:
        return await _unheeding(a2a_url, task_id, seconds, cast(int, interval), **options)
    until = time.monotonic() + seconds
    told = asyncio.ensure_future(ends.next())
    polls = [asyncio.ensure_future(_unheeding(a2a_url, task_id, seconds, cast(int, interval), **options))]
    try:
        await asyncio.wait((told, *polls), return_when=asyncio.FIRST_COMPLETED)
        if not polls[0].done():
            left, pace = round(until - time.monotonic()), cast(Any, _Growing(interval))
            polls.append(asyncio.ensure_future(_unheeding(a2a_url, task_id, left, pace, **options)))
        done, _ = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for each in (told, *polls):
            each.cancel()
        await asyncio.gather(told, *polls, return_exceptions=True)
