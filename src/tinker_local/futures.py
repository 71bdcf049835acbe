"""Results that clients come back for: they ask for a ticket's outcome until there is one."""

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tinker_local.errors import ServiceError
from tinker_local.operations import Result

_KEPT_SECONDS = 600.0  # an answer lost on the way can be asked for again this long
_KEPT_COUNT = 4096

Outcome = Result | ServiceError


@dataclass
class _Future:
    done: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Outcome | None = None
    finished: float = 0.0
    number: int = 0  # how many were finished before and with this one


class Futures:
    """Outcomes by ticket. Belongs to the event loop."""

    def __init__(self) -> None:
        self._open: dict[str, _Future] = {}
        self._finished: OrderedDict[str, _Future] = OrderedDict()
        # Numbers of an earlier start of the service must be smaller: clients hold on to them.
        self._numbers = itertools.count(time.time_ns() // 1000)
        self._more = asyncio.Event()  # set, and replaced, whenever a ticket is finished

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._open or ticket in self._finished

    @property
    def open_count(self) -> int:
        """How many tickets wait for their outcome."""
        return len(self._open)

    def open(self, ticket: str) -> None:
        """Expect an outcome for the ticket."""
        self._open[ticket] = _Future()

    def finish(self, ticket: str, outcome: Outcome) -> None:
        """Set the ticket's outcome, once; it is kept for a while."""
        future = self._open.pop(ticket, None)
        if future is None:
            return
        future.outcome, future.finished, future.number = outcome, time.monotonic(), next(self._numbers)
        self._finished[ticket] = future
        future.done.set()
        self._more.set()
        self._more = asyncio.Event()
        self._forget_old()

    def fail_all(self, error: ServiceError) -> None:
        """Give every open ticket this error."""
        for ticket in list(self._open):
            self.finish(ticket, error)

    async def wait(self, ticket: str, *, seconds: float) -> Outcome | None:
        """Return the ticket's outcome, or None if there is none after that many seconds.

        Raises KeyError for a ticket that was never given or whose outcome is not kept any more.
        """
        future = self._open.get(ticket) or self._finished[ticket]
        if future.outcome is None:
            try:
                await asyncio.wait_for(future.done.wait(), seconds)
            except TimeoutError:
                return None
        return future.outcome

    async def finished_since(
        self, number: int, wanted: Callable[[str], bool], *, seconds: float
    ) -> list[tuple[int, str, bool]]:
        """Return number, ticket and success of what was finished after `number`; wait up to `seconds` for any."""
        deadline = time.monotonic() + seconds
        while True:
            more = self._more
            found = [
                (future.number, ticket, not isinstance(future.outcome, ServiceError))
                for ticket, future in self._finished.items()
                if future.number > number and wanted(ticket)
            ]
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            try:
                await asyncio.wait_for(more.wait(), left)
            except TimeoutError:
                return []

    def _forget_old(self) -> None:
        oldest_kept = time.monotonic() - _KEPT_SECONDS
        while self._finished:
            future = next(iter(self._finished.values()))
            if future.finished > oldest_kept and len(self._finished) <= _KEPT_COUNT:
                return
            self._finished.popitem(last=False)
