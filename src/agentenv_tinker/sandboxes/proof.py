"""Whether a container, once its env was reset, is as it was before its first episode.

Compared are what the env says that it holds (data/get), every file, folder and node that changed since the container
was created, with its content, on every filesystem of the container, the System V memory, and the processes. What lives
in the server's own memory shows in data/get alone, so an env that does not declare that operation is never recycled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from agentenv_tinker.errors import SandboxError
from agentenv_tinker.sandboxes.host import Container, Host

_RPC_PATH = "/agentenv"
_RESET, _GET = "data/reset", "data/get"
_SECONDS = 30.0
_GROWTH_KB = 256 * 1024  # an env that grew by more leaks

# What changed since $1, by the time of a change, which no process can set. Other mounts are gone through one by one.
_CHANGES = r"""
set -eu
while read -r _ at type _; do
  case $type in proc|sysfs|cgroup*|devpts) continue ;; esac
  find "$at" -xdev '(' -path /proc -o -path /sys ')' -prune -o -newerct "$1" -printf '%y %m %U:%G %s %l %p\n' \
    '(' -type f -exec sha256sum {} + -o -type d -exec ls -A {} ';' -o -true ')'
done < /proc/mounts
cut -c 1-70 /proc/sysvipc/msg /proc/sysvipc/sem /proc/sysvipc/shm
echo complete
"""
_TRIES = 3  # of a listing of which a busy daemon lost a part, or all, without a word


@dataclass(frozen=True)
class State:
    """What of a container can be told apart from outside."""

    data: str
    files: str
    paths: tuple[str, ...]
    processes: tuple[str, ...]
    memory_kb: int

    def difference(self, fresh: State) -> str | None:
        """In what this state differs from a fresh one's, or None."""
        for name in ("data", "processes", "paths", "files"):
            mine, its = getattr(self, name), getattr(fresh, name)
            if mine != its:
                return f"its {name} differ: {_first_difference(mine, its)}"
        if self.memory_kb > fresh.memory_kb + _GROWTH_KB:
            return f"its memory grew from {fresh.memory_kb} to {self.memory_kb} KB"
        return None


def _first_difference(mine: str | tuple[str, ...], its: str | tuple[str, ...]) -> str:
    here, there = (each.splitlines() if isinstance(each, str) else each for each in (mine, its))
    changed = [f"has {line[:200]!r}" for line in here if line not in there]
    return next(iter(changed + [f"lacks {line[:200]!r}" for line in there if line not in here]), "another order")


def resettable(container: Container) -> bool:
    """Whether an env declares that it can be reset and looked into, and keeps nothing where that can't be seen."""
    operations = (container.card.get("capabilities") or {}).get("operations") or []
    return {_RESET, _GET} <= set(operations) and not container.volumes


def state_of(host: Host, container: Container) -> State:
    """A container's state now. Blocks for about 0.15 s. Raises SandboxError, DockerException or httpx.HTTPError."""
    data = _call(host, container, _GET)
    files = _files(host, container)
    return State(data, files, _paths(host, container), *_processes(host, container))


def _files(host: Host, container: Container) -> str:
    """What changed in the container's files since it was created, as its own tools list it."""
    command = ["sh", "-c", _CHANGES, "sh", container.created]
    for _ in range(_TRIES):
        ran = host.client.api.exec_create(container.id, command, user="0")["Id"]
        out, err = host.client.api.exec_start(ran, demux=True)
        listed = str((out or b"").decode(errors="replace"))
        ended = host.client.api.exec_inspect(ran)["ExitCode"]
        if ended != 0 or err:
            said = (err or out or b"").decode(errors="replace").strip()[-300:]
            raise SandboxError(f"its files can't be listed (exit code {ended}): {said}")
        if listed.endswith("\ncomplete\n"):
            return listed
    raise SandboxError(f"its files can't be listed: {_TRIES} listings were cut short")


def _paths(host: Host, container: Container) -> tuple[str, ...]:
    """The paths that the daemon sees changed, where root could have changed the very tools that list the files."""
    if not container.root:
        return ()
    changes = host.client.api.diff(container.id) or []
    return tuple(sorted(f"{change['Kind']} {change['Path']}" for change in changes))


def _processes(host: Host, container: Container) -> tuple[tuple[str, ...], int]:
    """The processes, each with its PID and when it started, and the memory that they hold, in KB."""
    rows = host.client.api.top(container.id, "-eo pid,ppid,rss,lstart,args")["Processes"]
    listed = tuple(sorted(" ".join((*row[:2], *row[3:])) for row in rows))
    return listed, sum(int(row[2]) for row in rows)


def reset(host: Host, container: Container) -> None:
    """Have an env forget all that was done to it. Raises SandboxError or httpx.HTTPError."""
    answer = _call(host, container, _RESET)
    if "error" in json.loads(answer):
        raise SandboxError(f"its reset failed: {answer}")


def _call(host: Host, container: Container, method: str) -> str:
    """What the env answers, an error too: one that holds nothing may say so by an error."""
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {}}
    answer = host.http.post(f"{container.url}{_RPC_PATH}", json=request, timeout=_SECONDS)
    if answer.status_code >= 500:
        raise SandboxError(f"{method} answered {answer.status_code}")
    try:
        body: Any = answer.json()
    except ValueError as error:
        raise SandboxError(f"{method} answered no JSON") from error
    kept = {"error": body["error"]} if "error" in body else {"result": body.get("result")}
    return json.dumps(kept, sort_keys=True)


PROOF_ERRORS = (SandboxError, httpx.HTTPError, KeyError, TypeError, ValueError)
"""What an env's own answers may raise here, besides what Docker does."""
