"""Who owns a container, and whether that owner still lives: so that what a killed process left can be removed.

Processes of one PID namespace look each other up. Anyone else's, as another container's or machine's, tells by a
lease: a labelled volume that it renews, whose age is read by the daemon's own clock.
"""

from __future__ import annotations

import itertools
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from docker.errors import APIError, NotFound

from docker import DockerClient

OWNER_LABEL = "agentenv-tinker.owner"
RENEW_SECONDS = 20.0
_LEASE = timedelta(seconds=120)  # some renewals may fail or be late, as a loaded daemon makes them


def this_process() -> str:
    """This process's identity: its machine's boot, its PID namespace, its PID and when it started."""
    return f"{_namespace()}-{os.getpid()}-{_started(os.getpid())}"


def _namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _started(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None where no such process runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class Owners:
    """The owners that one daemon knows of, this process among them once it holds its lease."""

    def __init__(self, client: DockerClient) -> None:
        self.me = this_process()
        self._client = client
        self._serial = itertools.count()

    def renew(self) -> None:
        """Take the lease, or make it last for longer. Raises DockerException."""
        held = self._leases().get(self.me, [])
        self._client.volumes.create(f"agentenv-tinker-{self.me}-{next(self._serial)}", labels={OWNER_LABEL: self.me})
        self._drop(held)

    def release(self, owner: str) -> None:
        """Drop the lease of `owner`. Raises DockerException."""
        self._drop(self._leases().get(owner, []))

    def dead(self, owners: set[str]) -> set[str]:
        """Those of `owners` and of all that hold a lease that live no more. Raises DockerException."""
        leases = self._leases()
        now = _moment(self._client.info()["SystemTime"])
        return {owner for owner in owners | set(leases) if not self._lives(owner, leases.get(owner, []), now)}

    def _lives(self, owner: str, leases: list[Any], now: datetime) -> bool:
        if owner == self.me:
            return True
        namespace, _, process = owner.rpartition("-")[0].rpartition("-")
        if namespace == _namespace():
            return str(_started(int(process))) == owner.rpartition("-")[2]
        return any(now - _moment(lease.attrs["CreatedAt"]) < _LEASE for lease in leases)

    def _leases(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for volume in self._client.volumes.list(filters={"label": OWNER_LABEL}):
            found.setdefault(volume.attrs["Labels"][OWNER_LABEL], []).append(volume)
        return found

    def _drop(self, leases: list[Any]) -> None:
        for lease in leases:
            try:
                lease.remove()
            except NotFound:
                pass
            except APIError as error:
                if error.status_code != 409:  # another reaper is at it
                    raise


def _moment(text: str) -> datetime:
    """An RFC 3339 time of the daemon's, whose nanoseconds Python does not read."""
    whole, _, rest = text.partition(".")
    zone = rest.lstrip("0123456789")
    return datetime.fromisoformat((whole + zone).replace("Z", "+00:00"))
