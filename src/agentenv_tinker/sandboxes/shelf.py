"""The containers of one spec: which are warm, which are out, and how many more there should be. No Docker here.

Every method is called with the pool's lock held.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from agentenv_tinker.sandboxes.host import Container, Spec
from agentenv_tinker.sandboxes.proof import State

_LONGEST_PAUSE = 60.0
_DISPROOFS = 3


@dataclass(eq=False)
class Warm:
    """A container of the pool's that serves its env and is in no episode."""

    container: Container
    fresh: State | None
    """What it was before its first episode; None for one that is not recycled."""
    episodes: int = 0
    """How many it was in."""


@dataclass(eq=False)
class Lease:
    """A container while it is an episode's."""

    id: str
    """Never used again, so that a late word about an earlier episode can't end a later one."""
    warm: Warm
    shelf: Shelf
    released: bool = False
    """Whether the episode gave it back."""
    went_well: bool | None = None
    """How the episode went, once that is known."""
    patience: threading.Timer | None = None
    """Ends the wait for that, where it is awaited."""


@dataclass(eq=False)
class Shelf:
    """The containers of one spec."""

    spec: Spec
    idle: list[Warm] = field(default_factory=list)
    waiting: deque[Future[Lease]] = field(default_factory=deque)
    starting: int = 0
    coming: int = 0
    """Those that are being handed over, or being made ready for their next episode."""
    out: int = 0
    peak: int = 0
    """The most that were out at once, which is how many are kept ready."""
    recycles: bool | None = None
    """Whether its containers are used again; None while none has started yet."""
    used_at: float = field(default_factory=time.monotonic)
    _failures: int = 0
    _paused_until: float = 0.0
    _disproofs: int = 0

    def missing(self, *, room: bool) -> int:
        """How many containers to start now: for who waits, and where there is `room`, for who will."""
        asked = len([each for each in self.waiting if not each.cancelled()])
        asked -= self.starting + self.coming + len(self.idle)
        if asked > 0:
            return asked
        if not room or self.recycles is None or time.monotonic() < self._paused_until:
            return 0
        ready = self.starting + self.coming + len(self.idle)
        return max(0, self.peak - ready - (self.out if self.recycles else 0))

    def next_waiting(self) -> Future[Lease] | None:
        """Who is to have the next container, if anybody still waits."""
        while self.waiting:
            first = self.waiting.popleft()
            if not first.cancelled():
                return first
        return None

    def lent(self) -> None:
        """Count a container that went out."""
        self.out += 1
        self.peak = max(self.peak, self.out)
        self.used_at = time.monotonic()

    def start_failed(self) -> None:
        """Start none ahead for a while, longer with each failure in a row."""
        self._failures += 1
        self._paused_until = time.monotonic() + min(2.0**self._failures, _LONGEST_PAUSE)

    def started(self, *, recycles: bool) -> None:
        """Note that a start went well."""
        self._failures = 0
        if self.recycles is None:
            self.recycles = recycles

    def proved(self, *, clean: bool) -> None:
        """Note whether a reset left a container as new; an env whose resets don't is soon reset no more."""
        self._disproofs = 0 if clean else self._disproofs + 1
        if self._disproofs >= _DISPROOFS:
            self.recycles = False
