"""Runs groups in other processes: spawned ones of this machine, or a Ray cluster's, as the cookbook's rollout executor.

A group is played by one worker from its first observation to its rewards. Where that worker dies, another plays the
group anew; the pool of sandboxes removes what the dead one left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from agentenv_tinker import framework
from agentenv_tinker.errors import ConfigError, EpisodeFailedError

logger = logging.getLogger(__name__)

TRIES = 3  # of a group whose worker dies
_STOP_SECONDS = 30.0  # for the workers to tear their episodes down
_SPAWN = multiprocessing.get_context("spawn")  # the Tinker client's thread does not survive a fork
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Call:
    """A call that can be pickled."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.arguments, **self.options)


@dataclass(eq=False)
class _Job:
    """A group to play."""

    call: _Call
    result: Future[Any] = field(default_factory=Future)
    tries: int = 0


class WorkerPool(Executor):
    """Spawned processes that play one group each at a time, by a thread of this one for each."""

    def __init__(self, size: int, *, hosts: Sequence[str] = (), log: Path | None = None) -> None:
        """`hosts` are sandbox hosts as DOCKER_HOST names them, handed out in turn; none for that of the environment.

        What the workers print goes to `log`.
        """
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._stopping = False
        self._workers = [_Worker(hosts[n % len(hosts)] if hosts else None, log) for n in range(size)]
        self._threads = [threading.Thread(target=self._work, args=(worker,), daemon=True) for worker in self._workers]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have a worker call `fn`, which must be pickleable, as its arguments and result are."""
        job = _Job(_Call(fn, args, kwargs))
        self._jobs.put(job)
        return job.result

    def _work(self, worker: _Worker) -> None:
        while (job := self._jobs.get()) is not None:
            if job.tries or job.result.set_running_or_notify_cancel():
                self._play(worker, job)
        worker.stop()

    def _play(self, worker: _Worker, job: _Job) -> None:
        job.tries += 1
        try:
            job.result.set_result(worker.call(job.call))
        except WorkerDiedError as died:
            if self._stopping or job.tries >= TRIES:
                job.result.set_exception(EpisodeFailedError(f"{died}, at try {job.tries} of {TRIES}"))
                return
            logger.warning("%s; another plays its group anew (try %d of %d)", died, job.tries + 1, TRIES)
            self._jobs.put(job)
        except BaseException as error:
            job.result.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Have each worker end after its group.

        With `cancel_futures`, groups that wait are dropped, and those under way torn down, for which they have a while.
        """
        self._stopping = True
        if cancel_futures:
            with contextlib.suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job.result.cancel()
            for worker in self._workers:
                worker.interrupt()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads if wait else ():
            thread.join(_STOP_SECONDS if cancel_futures else None)
        for worker in self._workers if cancel_futures else ():
            worker.kill()


class WorkerDiedError(Exception):
    """A worker process that is gone before it answered."""


class _Worker:
    """A process that is started when there is something to do, and again where it died."""

    def __init__(self, host: str | None, log: Path | None) -> None:
        self._settings = (host, log)
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    def call(self, call: _Call) -> Any:
        """What `call` returns or raises in the process. Blocks. Raises WorkerDiedError."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._connection is not None
        pid = self._process.pid
        try:
            self._connection.send(call)
            worked, value = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process = None
            raise WorkerDiedError(f"rollout worker {pid} died") from error
        if not worked:
            raise value
        return value

    def _start(self) -> None:
        self._connection, its_end = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(its_end, *self._settings), daemon=True)
        self._process.start()
        its_end.close()

    def interrupt(self) -> None:
        """Have it tear down what it plays."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End it, whatever it does."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Have it end once it has nothing to do. Blocks."""
        process, self._process = self._process, None
        if process is not None and self._connection is not None:
            self._connection.close()
            process.join()


def _serve(connection: Connection, host: str | None, log: Path | None) -> None:
    """What a worker does: the calls that come, one after the other, until none can come any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches every process of a terminal; the trainer says when
    if log is not None:
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, sys.stdout.fileno())
        os.dup2(opened, sys.stderr.fileno())
    if host is not None:
        os.environ["DOCKER_HOST"] = host
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt), framework.routing():
        while True:
            call = connection.recv()
            signal.signal(
                signal.SIGINT, signal.default_int_handler
            )  # asyncio takes it over, and cancels what is played
            signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
            connection.send(_answer(call))


def _answer(call: _Call) -> tuple[bool, Any]:
    try:
        return True, call()
    except Exception as error:
        error.add_note(traceback.format_exc())
        return False, error


class RayWorkers(Executor):
    """The processes of a Ray cluster. Ray places the groups, each on one CPU, and plays those of a dead worker anew."""

    def __init__(self, address: str) -> None:
        """Join the cluster at `address`, or start one on this machine for `local`. Raises ConfigError."""
        try:
            import ray
        except ImportError:
            raise ConfigError("--ray needs Ray: pip install 'agentenv-tinker[ray]'") from None
        passed = {name: value for name, value in os.environ.items() if name.startswith("TINKER_")}
        passed["XDG_STATE_HOME"] = os.environ.get("XDG_STATE_HOME", "")
        try:
            ray.init(
                address=None if address == "local" else address,
                runtime_env={"env_vars": passed},
                log_to_driver=False,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"the Ray cluster at {address!r} can't be joined: {error}") from error
        self._ray = ray
        self._play = ray.remote(num_cpus=1, max_retries=TRIES - 1)(_in_ray)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have a worker of the cluster call `fn`, which must be pickleable, as its arguments and result are."""
        future: Future[_T] = self._play.remote(_Call(fn, args, kwargs)).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster."""
        self._ray.shutdown()


def _in_ray(call: _Call) -> Any:
    with framework.routing():
        return call()


@contextlib.asynccontextmanager
async def rollout_executor(
    workers: int, ray: str, *, hosts: Sequence[str] = (), log: Path | None = None
) -> AsyncIterator[Executor | None]:
    """The executor that groups are played in for the block: `workers` processes, the Ray cluster at an address, or None
    for this process. Whatever ends the block, the episodes under way are torn down. Raises ConfigError."""
    executor: Executor | None = None
    if ray:
        executor = await asyncio.to_thread(RayWorkers, ray)
    elif workers:
        executor = WorkerPool(workers, hosts=hosts, log=log)
    try:
        yield executor
    finally:
        if executor is not None:
            await asyncio.to_thread(executor.shutdown, cancel_futures=True)
