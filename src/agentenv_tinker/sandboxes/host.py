"""The containers of a pool on its Docker daemon: starting one, watching it, removing it, and finding what others left.

Every call blocks, is bounded in time, and is tried again while a busy daemon fails it; only so many starts are under
way at once.
"""

from __future__ import annotations

import io
import logging
import random
import tarfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

import docker
from agentenv_tinker.errors import SandboxError, described
from agentenv_tinker.sandboxes.limits import Limits
from agentenv_tinker.sandboxes.owner import OWNER_LABEL, Owners

_T = TypeVar("_T")
logger = logging.getLogger(__name__)

PREFIX = "agentenv-pool-"
_ANSWER_SECONDS = 60
_STARTS_AT_ONCE = 4
_READY_SECONDS = 180.0  # as the framework waits for a server
_TRIES = 5
_KILLS = 3
_POLL_SECONDS = 0.05
_ROOM = 0.15  # of the machine's memory, below which none is started ahead
_CARD_PATH = "/.well-known/agent-env.json"
_LIMITS = Limits()


@dataclass(frozen=True)
class Spec:
    """What a container runs. Those of one spec are interchangeable."""

    image: str
    """The image's name, or its id."""
    port: int
    """The port that the env serves in the container."""
    env: tuple[tuple[str, str], ...]
    extra_hosts: tuple[tuple[str, str], ...] = ()
    host_ips: tuple[str, ...] = ("127.0.0.1",)
    """Where its port is published; the pool reaches it at the first."""
    trust: Path | None = None
    """A folder whose files the container finds in `trust_at`."""
    trust_at: str = "/etc/agentenv"


@dataclass(frozen=True)
class Container:
    """A container that serves its env."""

    id: str
    name: str
    host_port: int
    url: str
    created: str
    """When it was created, by the daemon's clock."""
    card: dict[str, Any]
    root: bool
    """Whether its processes run as root."""
    volumes: bool
    """Whether it writes to volumes."""


class Host:
    """A Docker daemon, and this process as the owner of the containers that it starts there."""

    def __init__(self, *, free_port: Callable[[], int], limits: Limits = _LIMITS) -> None:
        self.client = docker.from_env(timeout=_ANSWER_SECONDS, max_pool_size=64)
        self.http = httpx.Client(verify=False, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self.owners = Owners(self.client)
        self.stopping = threading.Event()
        self._free_port = free_port
        self._limits = limits
        self._starts = threading.BoundedSemaphore(_STARTS_AT_ONCE)

    def close(self) -> None:
        """Close every connection."""
        self.http.close()
        self.client.close()

    def image_id(self, image: str) -> str:
        """The id of the image that `image` names now. Raises SandboxError where the daemon has none."""
        try:
            return str(self._patient(lambda: self.client.images.get(image)).id)
        except ImageNotFound as error:
            raise SandboxError(f"the sandbox host has no image {image!r}; prepare the bundle again") from error

    def start(self, spec: Spec) -> Container:
        """Start a container and wait until its env serves its card. Whatever stops it, the container is removed.

        One that somebody kills meanwhile is started anew, so many times. Raises SandboxError.
        """
        for _ in range(_KILLS):
            try:
                return self._start(spec)
            except _KilledError as error:
                logger.info("%s, and is started anew", error)
        return self._start(spec)

    def _start(self, spec: Spec) -> Container:
        name = f"{PREFIX}{uuid.uuid4().hex[:12]}"
        try:
            with self._starts:
                host_port = self._patient(lambda: self._run(spec, name))
            found = self.client.containers.get(name)
            url = f"http://{spec.host_ips[0]}:{host_port}"
            card = self._ready(found, url)
        except (DockerException, requests.RequestException) as error:
            self.remove(name)
            raise SandboxError(f"a container of {spec.image!r} did not start: {described(error)}") from error
        except BaseException:
            self.remove(name)
            raise
        user = str(found.attrs["Config"].get("User") or "0").partition(":")[0]
        return Container(
            id=str(found.id),
            name=name,
            host_port=host_port,
            url=url,
            created=found.attrs["Created"],
            card=card,
            root=user in ("0", "root"),
            volumes=bool(found.attrs["Mounts"]),
        )

    def _run(self, spec: Spec, name: str) -> int:
        """Create and start the container, on a host port that nothing uses."""
        self._discard(name)  # of the try before this one
        try:
            host_port = self._free_port()
        except (OSError, RuntimeError) as error:
            raise SandboxError(f"no host port is free for a container: {described(error)}") from error
        published: Any = [(ip, host_port) for ip in spec.host_ips]
        created = self.client.containers.create(
            spec.image,
            name=name,
            environment=dict(spec.env),
            ports={f"{spec.port}/tcp": published},
            extra_hosts=dict(spec.extra_hosts),
            labels={OWNER_LABEL: self.owners.me},
            **self._limits.options(),
        )
        if spec.trust is not None:
            created.put_archive("/", _archive(spec.trust, at=spec.trust_at))
        created.start()
        return host_port

    def _ready(self, container: Any, url: str) -> dict[str, Any]:
        deadline = time.monotonic() + _READY_SECONDS
        look = time.monotonic() + 1
        while (card := self.card(url)) is None:
            if self.stopping.wait(_POLL_SECONDS):
                raise SandboxError("the pool was closed while a container started")
            now = time.monotonic()
            if now > deadline:
                raise SandboxError(f"an env served no card at {url}{_CARD_PATH} in {_READY_SECONDS:g} s")
            if now > look:
                look = now + 1
                container.reload()
                if container.status != "running":
                    said = container.logs(tail=20).decode(errors="replace").strip()
                    kind = _KilledError if _was_killed(container.attrs["State"]) else SandboxError
                    raise kind(f"an env's container is {container.status} before it served its card: {said}")
        return card

    def card(self, url: str) -> dict[str, Any] | None:
        """The card that the env at `url` serves, or None while it serves none."""
        try:
            answer = self.http.get(f"{url}{_CARD_PATH}", timeout=5)
            card = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None
        return card if isinstance(card, dict) and card.get("name") else None

    def remove(self, container: str) -> None:
        """Remove a container by its name or id, if it is there. What the daemon refuses is logged, for the reaper."""
        try:
            self._patient(lambda: self._discard(container))
        except (DockerException, requests.RequestException) as error:
            logger.warning("container %s was not removed yet: %s", container, described(error))

    def _discard(self, container: str) -> None:
        try:
            self.client.api.remove_container(container, force=True, v=True)
        except NotFound:
            pass
        except APIError as error:
            if error.status_code != 409:  # it is being removed already
                raise

    def mine(self) -> dict[str, str]:
        """The names, by id, of this process's containers. Raises DockerException."""
        listed = self.client.api.containers(all=True, filters={"label": f"{OWNER_LABEL}={self.owners.me}"})
        return {each["Id"]: each["Names"][0].lstrip("/") if each["Names"] else "" for each in listed}

    def reap(self) -> int:
        """Remove what owners that live no more left, and return how many containers it was. Raises DockerException."""
        listed = self.client.api.containers(all=True, filters={"label": OWNER_LABEL})
        owned = [(each["Labels"][OWNER_LABEL], each["Id"]) for each in listed]
        dead = self.owners.dead({owner for owner, _ in owned})
        left = [container for owner, container in owned if owner in dead]
        for container in left:
            self.remove(container)
        for owner in dead:
            self.owners.release(owner)
        return len(left)

    def _patient(self, call: Callable[[], _T]) -> _T:
        """`call`'s result, tried again with growing pauses while the daemon is too busy for it."""
        for tried in range(1, _TRIES + 1):
            try:
                return call()
            except (DockerException, requests.RequestException) as error:
                if tried == _TRIES or not _passing(error) or self.stopping.is_set():
                    raise
                logger.info("the daemon failed a call, which is tried again: %s", described(error))
                self.stopping.wait(0.25 * 2**tried * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable")


class _KilledError(SandboxError):
    """A container was killed from outside as it started, which says nothing of its env."""


def _was_killed(state: dict[str, Any]) -> bool:
    return state.get("ExitCode") == 137 and not state.get("OOMKilled")


def _passing(error: Exception) -> bool:
    """Whether `error` may be gone the next time: a daemon that is slow, or errs, or a port taken meanwhile."""
    if isinstance(error, APIError):
        if "no available IPv4 addresses" in str(error.explanation):
            return False
        return error.status_code is None or error.status_code >= 500
    return isinstance(error, requests.RequestException)


def _archive(folder: Path, *, at: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=at.lstrip("/"))
    return packed.getvalue()


def has_room() -> bool:
    """Whether this machine has memory left for containers that nobody has asked for yet."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return True
    sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemAvailable"] > _ROOM * sizes["MemTotal"]
