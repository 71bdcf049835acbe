"""What an env container may take of its host, so that one that runs wild harms no other: memory, CPU and processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentenv_tinker.errors import ConfigError

_PERIOD = 100_000  # microseconds, Docker's own


@dataclass(frozen=True)
class Limits:
    """The bounds of one container."""

    memory: str = "2g"
    """Bytes, or so many k, m or g; its processes are killed above it, and it gets no swap."""
    cpus: float = 2.0
    """CPU seconds in a second. A host may have fewer."""
    pids: int = 1024
    """Processes and threads."""

    def options(self) -> dict[str, Any]:
        """The bounds as Docker's SDK takes them."""
        quota = {"cpu_period": _PERIOD, "cpu_quota": int(self.cpus * _PERIOD)}
        return {"mem_limit": self.memory, "memswap_limit": self.memory, "pids_limit": self.pids, **quota}


def given_limits(environment: Mapping[str, str] = os.environ) -> Limits:
    """The bounds that SANDBOX_MEMORY, SANDBOX_CPUS and SANDBOX_PIDS name, each with its default. Raises ConfigError."""
    return Limits(
        memory=_given(environment, "SANDBOX_MEMORY", Limits.memory, r"[1-9]\d*[kmg]?", "a size such as 512m"),
        cpus=float(_given(environment, "SANDBOX_CPUS", str(Limits.cpus), r"\d+(\.\d+)?", "a number such as 1.5")),
        pids=int(_given(environment, "SANDBOX_PIDS", str(Limits.pids), r"[1-9]\d*", "a whole number such as 256")),
    )


def _given(environment: Mapping[str, str], name: str, default: str, pattern: str, meant: str) -> str:
    value = environment.get(name) or default
    if not re.fullmatch(pattern, value) or not float(value.rstrip("kmg")) >= 0.01:
        raise ConfigError(f"{name} must be {meant}, not {value!r}")
    return value
