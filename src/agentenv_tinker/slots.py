"""The slots that bound the episodes under way on one event loop.

Who asks for a slot comes before who starts ahead; and who started ahead, and is still unused, gives way to who asks.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable

_Queue = deque["asyncio.Future[None]"]
_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, Slots]] = weakref.WeakKeyDictionary()

# Of 256 that start at once, a loop is so late that connections within this process time out, idle for 5 seconds.
_STARTS = 32
_starts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def slots(size: int) -> Slots:
    """The `size` slots of the running event loop, for groups and splits together."""
    by_size = _of_loop.setdefault(asyncio.get_running_loop(), {})
    return by_size.setdefault(size, Slots(size))


def starts() -> asyncio.Semaphore:
    """What bounds the episodes that start at the same time on the running event loop, of those that have a slot."""
    return _starts.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_STARTS))


class Slots:
    """So many slots, handed on in the order in which they were asked for."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._asking: _Queue = deque()
        self._ahead: _Queue = deque()
        self._unused: list[Slot] = []
        self._leaving = 0  # of those told to give way, how many still hold their slot

    async def take(self) -> Slot:
        """Wait for a slot."""
        await self._turn(self._asking)
        return Slot(self, None)

    async def take_ahead(self, give_way: Callable[[], None]) -> Slot:
        """Wait for a slot that nobody asks for. `give_way` is called where it is needed before it is claimed."""
        await self._turn(self._ahead)
        slot = Slot(self, give_way)
        self._unused.append(slot)
        self._make_room()
        return slot

    async def _turn(self, queue: _Queue) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._make_room()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                queue.remove(turn)
            else:  # it had come
                self._hand_on()
            raise

    def _make_room(self) -> None:
        """Tell unused holders to give way, the last ones first, until there is one for each who asks."""
        while self._unused and len(self._asking) > self._leaving:
            slot = self._unused.pop()
            slot.leaving = True
            self._leaving += 1
            assert slot.give_way is not None
            slot.give_way()

    def _hand_on(self) -> None:
        for queue in (self._asking, self._ahead):
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self._free += 1

    def given_back(self, slot: Slot) -> None:
        """Hand a slot on to who waits."""
        if slot in self._unused:
            self._unused.remove(slot)
        self._leaving -= slot.leaving
        self._hand_on()

    def claimed(self, slot: Slot) -> bool:
        """Whether a slot that was taken ahead is kept from now on: it was not told to give way."""
        if slot not in self._unused:
            return False
        self._unused.remove(slot)
        return True


class Slot:
    """One slot, until it is given back."""

    def __init__(self, slots: Slots, give_way: Callable[[], None] | None) -> None:
        self.leaving = False
        self.give_way = give_way
        self._slots = slots

    def claim(self) -> bool:
        """Keep a slot that was taken ahead. False where it is needed elsewhere, and is to be given back."""
        return self._slots.claimed(self)

    def give_back(self) -> None:
        """Let the next one have it. Once."""
        self._slots.given_back(self)
