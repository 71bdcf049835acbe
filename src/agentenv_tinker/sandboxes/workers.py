"""Threads that work off a queue and never keep the process from ending, as those of concurrent.futures do."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class Workers:
    """At most `most` threads, started as there is work."""

    def __init__(self, name: str, *, most: int) -> None:
        self._name = name
        self._most = most
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # held while a thread is added, and while they are told to end

    def submit(self, job: Job) -> None:
        """Have `job` done, in the order of the submissions, unless the workers were stopped."""
        self._jobs.put(job)
        with self._lock:
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self, *, seconds: float, finish: bool) -> None:
        """Let the jobs under way end, and where `finish` the waiting ones too, for up to `seconds`."""
        if not finish:
            with suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()
        with self._lock:
            threads, self._most = list(self._threads), 0
        for _ in threads:
            self._jobs.put(None)
        until = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # a bug, which must not take the thread from the other jobs
                logger.exception("a job of %s failed", self._name)
