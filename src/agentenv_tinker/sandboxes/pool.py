"""A warm pool of env containers: started before an episode asks, used again only when proven as new, removed meanwhile.

All that Docker takes time for runs in threads, so the pool serves any number of event loops. A container is in one
place at a time: starting, idle, being handed over, out with one lease, being reset, or gone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize

import httpx
import requests
from docker.errors import DockerException

from agentenv_tinker.errors import SandboxError, described
from agentenv_tinker.sandboxes import proof, verdicts
from agentenv_tinker.sandboxes.host import Container, Host, Spec, has_room
from agentenv_tinker.sandboxes.owner import RENEW_SECONDS, this_process
from agentenv_tinker.sandboxes.shelf import Lease, Shelf, Warm
from agentenv_tinker.sandboxes.workers import Workers

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 600.0  # longer than a step of training, over which containers stay warm
_VERDICT_SECONDS = 10.0  # an episode's scores and its verdict come right after its teardown
_CLOSE_SECONDS = 30.0
_MOST_EPISODES = 50
_ERRORS = (*proof.PROOF_ERRORS, DockerException, requests.RequestException, httpx.HTTPError, OSError)


class Pool:
    """The containers of this process on one Docker daemon."""

    def __init__(self, host: Host, *, recycle: bool) -> None:
        """`recycle` says whether a container may serve more than one episode. Raises SandboxError."""
        self._host = host
        self._recycle = recycle
        self._lock = threading.RLock()  # held for every change of where a container is, and never over Docker
        self._shelves: dict[Spec, Shelf] = {}
        self._leases: dict[str, Lease] = {}
        self._asked: set[Future[Lease]] = set()
        self._serial = itertools.count(1)
        self._starters = Workers("pool-start", most=32)  # most of a start is waiting for the env
        self._workers = Workers("pool-work", most=8)
        self._resetters = Workers("pool-reset", most=8)  # apart, so that no env's slow reset keeps others waiting
        self._removers = Workers("pool-remove", most=4)
        try:
            host.owners.renew()
        except (DockerException, requests.RequestException) as error:
            raise SandboxError(f"the sandbox pool can't use Docker: {described(error)}") from error
        self._removers.submit(self._reap)
        threading.Thread(target=self._keep, name="pool-keep", daemon=True).start()
        # atexit is not run where multiprocessing ends a worker; this is run there too, and in no fork
        self._at_exit = Finalize(None, self.close, exitpriority=100)

    async def take(self, spec: Spec) -> Lease:
        """A running container of `spec` that no other episode has. Cancelled, it takes none. Raises SandboxError."""
        asked: Future[Lease] = Future()
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        self._workers.submit(partial(self._ask, spec, asked))
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            if not asked.cancel():  # it was on its way
                asked.add_done_callback(self._unwanted)
            raise

    def held(self, lease_id: str) -> Lease | None:
        """The lease of that id, while its episode has it."""
        with self._lock:
            lease = self._leases.get(lease_id)
            return None if lease is None or lease.released else lease

    def give_back(self, lease_id: str) -> None:
        """Take a container back from its episode, and see to it in the background. Twice does no harm."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or lease.released:
                return
            lease.released = True
            lease.shelf.out -= 1
            lease.shelf.coming += 1
            if lease.went_well is None and self._may_serve_again(lease) and verdicts.expected():
                lease.patience = threading.Timer(_VERDICT_SECONDS, self.tell, (lease_id, False))
                lease.patience.daemon = True
                lease.patience.start()
            else:
                self._decide(lease)

    def tell(self, lease_id: str, went_well: bool) -> None:
        """Hear how the episode that has, or had, a container went. Only the first word counts."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or lease.went_well is not None:
                return
            lease.went_well = went_well
            if lease.patience is not None:
                lease.patience.cancel()
            if lease.released:
                self._decide(lease)

    @property
    def here(self) -> bool:
        """Whether it is this process's own, and no fork's copy of its parent's."""
        return self._host.owners.me == this_process()

    @property
    def closed(self) -> bool:
        """Whether it gives out no containers any more."""
        return self._host.stopping.is_set()

    def close(self) -> None:
        """Remove every container of this process and its lease. Blocks for seconds, a minute or so at most."""
        if self.closed or not self.here:
            return
        self._host.stopping.set()
        self._at_exit.cancel()
        with self._lock:
            self._shelves, self._leases = {}, {}
            for asked in list(self._asked):
                _fail(asked, SandboxError("the sandbox pool was closed"))
        for workers in (self._starters, self._workers, self._resetters):
            workers.stop(seconds=_CLOSE_SECONDS, finish=False)
        with suppress(DockerException, requests.RequestException):  # the next process's reaper finds what is left
            for container in self._host.mine():
                self._removers.submit(partial(self._host.remove, container))
            self._removers.stop(seconds=_CLOSE_SECONDS, finish=True)
            self._host.owners.release(self._host.owners.me)
        self._host.close()

    def _ask(self, spec: Spec, asked: Future[Lease]) -> None:
        try:
            spec = replace(spec, image=self._host.image_id(spec.image))
        except _ERRORS as error:
            _fail(asked, SandboxError(described(error)))
            return
        with self._lock:
            if self.closed:
                _fail(asked, SandboxError("the sandbox pool is closed"))
                return
            shelf = self._shelves.setdefault(spec, Shelf(spec))
            shelf.used_at = time.monotonic()
            shelf.waiting.append(asked)
            self._balance(shelf)

    def _balance(self, shelf: Shelf) -> None:
        """Hand idle containers to who waits, and start what is missing. With the lock held."""
        if self.closed:
            return
        while shelf.idle and (asked := shelf.next_waiting()) is not None:
            shelf.coming += 1
            self._workers.submit(partial(self._hand_over, shelf, shelf.idle.pop(), asked))
        for _ in range(shelf.missing(room=has_room())):
            shelf.starting += 1
            self._starters.submit(partial(self._start, shelf))

    def _start(self, shelf: Shelf) -> None:
        try:
            container = self._host.start(shelf.spec)
        except _ERRORS as error:
            self._start_failed(shelf, error)
            return
        recycles = self._recycle and shelf.recycles is not False and proof.resettable(container)
        fresh = self._fresh(container) if recycles else None
        with self._lock:
            shelf.starting -= 1
            shelf.started(recycles=recycles)
            if recycles and fresh is None:
                shelf.proved(clean=False)
            self._shelve(shelf, Warm(container, fresh))

    def _start_failed(self, shelf: Shelf, error: Exception) -> None:
        if not self.closed:
            logger.warning("%s", described(error))
        with self._lock:
            shelf.starting -= 1
            shelf.start_failed()
            short = shelf.starting + shelf.coming + len(shelf.idle) < len(shelf.waiting)
            if short and (asked := shelf.next_waiting()) is not None:
                _fail(asked, SandboxError(described(error)))
            self._balance(shelf)

    def _fresh(self, container: Container) -> proof.State | None:
        """What a container is before its first episode, or None where that can't be told."""
        try:
            return proof.state_of(self._host, container)
        except _ERRORS as error:
            logger.info("container %s is not used again: %s", container.name, described(error))
            return None

    def _shelve(self, shelf: Shelf, warm: Warm) -> None:
        """Make a container available. With the lock held."""
        if self.closed:
            return  # close() removes it
        shelf.idle.append(warm)
        self._balance(shelf)

    def _hand_over(self, shelf: Shelf, warm: Warm, asked: Future[Lease]) -> None:
        """Give a container to who asked, if it still serves its env."""
        alive = self._host.card(warm.container.url) is not None
        with self._lock:
            shelf.coming -= 1
            if not alive:
                self._remove(warm)
                shelf.waiting.appendleft(asked)
                self._balance(shelf)
            elif not asked.set_running_or_notify_cancel():
                self._shelve(shelf, warm)
            else:
                lease = Lease(f"{warm.container.name}-{next(self._serial)}", warm, shelf)
                self._leases[lease.id] = lease
                warm.episodes += 1
                shelf.lent()
                asked.set_result(lease)
                self._balance(shelf)

    def _unwanted(self, asked: Future[Lease]) -> None:
        if asked.exception() is None:
            lease = asked.result()
            self.tell(lease.id, False)
            self.give_back(lease.id)

    def _decide(self, lease: Lease) -> None:
        """Use the container of a lease that is over again, or never. With the lock held."""
        del self._leases[lease.id]
        shelf, warm = lease.shelf, lease.warm
        if lease.went_well and self._may_serve_again(lease):
            self._resetters.submit(partial(self._make_ready, shelf, warm))
        else:
            shelf.coming -= 1
            self._remove(warm)
            self._balance(shelf)

    def _may_serve_again(self, lease: Lease) -> bool:
        known = lease.warm.fresh is not None and lease.shelf.recycles is True
        return known and lease.warm.episodes < _MOST_EPISODES and not self.closed

    def _make_ready(self, shelf: Shelf, warm: Warm) -> None:
        dirty = self._reset(warm)
        with self._lock:
            shelf.coming -= 1
            shelf.proved(clean=dirty is None)
            if dirty is None:
                self._shelve(shelf, warm)
                return
            logger.info("container %s is not used again: after its reset %s", warm.container.name, dirty)
            self._remove(warm)
            self._balance(shelf)

    def _reset(self, warm: Warm) -> str | None:
        """Reset a container, and say what then still is of the episodes that it was in, if anything."""
        assert warm.fresh is not None
        try:
            proof.reset(self._host, warm.container)
            return proof.state_of(self._host, warm.container).difference(warm.fresh)
        except _ERRORS as error:
            return described(error)

    def _remove(self, warm: Warm) -> None:
        if not self.closed:
            self._removers.submit(partial(self._host.remove, warm.container.id))

    def _keep(self) -> None:
        """Every so often: keep the lease, remove what dead owners left and what nobody has asked for in long."""
        while not self._host.stopping.wait(RENEW_SECONDS):
            try:
                self._host.owners.renew()
            except (DockerException, requests.RequestException) as error:
                logger.warning("the pool's lease was not renewed: %s", described(error))
            with self._lock:
                for shelf in self._shelves.values():
                    if time.monotonic() - shelf.used_at > _IDLE_SECONDS and not shelf.out:
                        shelf.peak = 0
                        while shelf.idle:
                            self._remove(shelf.idle.pop())
                    self._balance(shelf)
            self._removers.submit(self._reap)

    def _reap(self) -> None:
        try:
            if left := self._host.reap():
                logger.info("removed %d containers that a stopped process had left", left)
        except (DockerException, requests.RequestException) as error:
            logger.warning("what stopped processes left was not removed: %s", described(error))


def _fail(asked: Future[Lease], error: SandboxError) -> None:
    if not asked.done() and asked.set_running_or_notify_cancel():
        asked.set_exception(error)
