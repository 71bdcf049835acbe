"""Runs operations on one thread that owns the model.

The operations of one run go in the order they arrived. Runs take turns, and so do training and sampling: whichever has
had less of the thread's time since both had something to do goes next.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

from tinker_local.errors import ServiceError, WorkerDiedError
from tinker_local.operations import Finished, Result, Sample, Training

_log = logging.getLogger(__name__)

Deliver = Callable[[str, Result | ServiceError], None]


class Backend(Protocol):
    """What carries out operations; only the worker's thread calls it."""

    @property
    def sampling(self) -> bool: ...

    def run(self, operation: Training) -> Generator[None, None, Result]: ...

    def sample(self, ticket: str, request: Sample) -> None: ...

    def cancel(self, ticket: str) -> None: ...

    def step(self) -> list[Finished]: ...


@dataclass(frozen=True)
class _Cancel:
    ticket: str


@dataclass
class _Line:
    """The operations of one run, the first of which may be under way."""

    waiting: deque[tuple[str, Training]] = field(default_factory=deque)
    underway: Generator[None, None, Result] | None = None


class Worker:
    """The thread and its queue. `deliver` is called on the thread with each ticket's outcome."""

    def __init__(self, backend: Backend, deliver: Deliver, died: Callable[[ServiceError], None]) -> None:
        self._backend = backend
        self._deliver = deliver
        self._died = died
        self._inbox: queue.SimpleQueue[tuple[str, Training | Sample] | _Cancel | None] = queue.SimpleQueue()
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._spent = {"training": 0.0, "sampling": 0.0}
        self._stopping = False
        self._thread = threading.Thread(target=self._live, name="tinker_local worker", daemon=True)
        self.death: WorkerDiedError | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, ticket: str, operation: Training | Sample) -> None:
        """Queue an operation, from any thread.

        Raises WorkerDiedError if the thread has died.
        """
        if self.death is not None:
            raise self.death
        self._inbox.put((ticket, operation))

    def cancel(self, ticket: str) -> None:
        """Drop a sample request, from any thread."""
        self._inbox.put(_Cancel(ticket))

    def stop(self, *, timeout: float) -> bool:
        """Stop after the piece of work under way and tell whether that happened within `timeout` seconds."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _live(self) -> None:
        try:
            while not self._stopping:
                self._take_in()
                if not self._stopping:
                    self._work()
        except BaseException as error:  # whatever ends this thread, clients must hear of it
            self.death = WorkerDiedError(
                f"the service's worker died of {type(error).__name__}: {error}; restart the service"
            )
            _log.critical("the worker died", exc_info=True)
            self._died(self.death)

    def _take_in(self) -> None:
        """Sort what has arrived into lines; wait for something if there is nothing to do."""
        idle = not self._lines and not self._backend.sampling
        while True:
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return
            idle = False
            if isinstance(message, _Cancel):
                self._backend.cancel(message.ticket)
            elif message is not None:
                self._sort(*message)

    def _sort(self, ticket: str, operation: Training | Sample) -> None:
        if not isinstance(operation, Sample):
            self._lines.setdefault(operation.model_id, _Line()).waiting.append((ticket, operation))
            return
        try:
            self._backend.sample(ticket, operation)
        except ServiceError as error:
            self._deliver(ticket, error)
        except (LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
            _log.error("%s failed", ticket, exc_info=True)
            self._deliver(ticket, ServiceError(f"sampling failed: {type(error).__name__}: {error}"))

    def _work(self) -> None:
        """Do one piece of training or sampling."""
        training, sampling = bool(self._lines), self._backend.sampling
        if not (training and sampling):
            self._spent = dict.fromkeys(self._spent, 0.0)
        started = time.monotonic()
        if training and (not sampling or self._spent["training"] <= self._spent["sampling"]):
            self._advance()
            self._spent["training"] += time.monotonic() - started
        elif sampling:
            for finished in self._backend.step():
                self._deliver(finished.ticket, finished.outcome)
            self._spent["sampling"] += time.monotonic() - started

    def _advance(self) -> None:
        """Let the next run have one piece of its first operation done."""
        model_id, line = next(iter(self._lines.items()))
        self._lines.move_to_end(model_id)
        ticket, operation = line.waiting[0]
        if line.underway is None:
            line.underway = self._backend.run(operation)
        try:
            next(line.underway)
            return
        except StopIteration as end:
            outcome: Result | ServiceError = end.value
        except ServiceError as error:
            outcome = error
        except (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
            _log.error("%s failed", ticket, exc_info=True)
            outcome = ServiceError(f"{type(operation).__name__} failed: {type(error).__name__}: {error}")
        line.underway = None
        line.waiting.popleft()
        if not line.waiting:
            del self._lines[model_id]
        self._deliver(ticket, outcome)
