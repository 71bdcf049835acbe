"""Results that clients come back for: they ask for a ticket's outcome until there is one."""

import asyncio
import time
from collections import OrderedDict
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


class Futures:
    """Outcomes by ticket. Belongs to the event loop."""

    def __init__(self) -> None:
        self._open: dict[str, _Future] = {}
        self._finished: OrderedDict[str, _Future] = OrderedDict()

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
        future.outcome, future.finished = outcome, time.monotonic()
        self._finished[ticket] = future
        future.done.set()
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

    def _forget_old(self) -> None:
        oldest_kept = time.monotonic() - _KEPT_SECONDS
        while self._finished:
            future = next(iter(self._finished.values()))
            if future.finished > oldest_kept and len(self._finished) <= _KEPT_COUNT:
                return
            self._finished.popitem(last=False)
