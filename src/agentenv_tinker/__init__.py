"""Trains a language model with Tinker on the tasks of an AgentEnv bundle."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentenv_tinker.dataset import AgentEnvDatasetBuilder, EpisodeGroupBuilder, TaskDataset
    from agentenv_tinker.env import EpisodeEnv, RolloutRules
    from agentenv_tinker.episode import Deadlines
    from agentenv_tinker.errors import (
        AgentEnvTinkerError,
        BundleError,
        ConfigError,
        EpisodeFailedError,
        EpisodeTimeoutError,
        SandboxError,
        ServiceError,
        TrainingError,
    )
    from agentenv_tinker.rollout import RolloutEnv

_MODULES = {
    "dataset": ("AgentEnvDatasetBuilder", "EpisodeGroupBuilder", "TaskDataset"),
    "env": ("EpisodeEnv", "RolloutRules"),
    "episode": ("Deadlines",),
    "errors": (
        "AgentEnvTinkerError",
        "BundleError",
        "ConfigError",
        "EpisodeFailedError",
        "EpisodeTimeoutError",
        "SandboxError",
        "ServiceError",
        "TrainingError",
    ),
    "rollout": ("RolloutEnv",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AgentEnvDatasetBuilder",
    "AgentEnvTinkerError",
    "BundleError",
    "ConfigError",
    "Deadlines",
    "EpisodeEnv",
    "EpisodeFailedError",
    "EpisodeGroupBuilder",
    "EpisodeTimeoutError",
    "RolloutEnv",
    "RolloutRules",
    "SandboxError",
    "ServiceError",
    "TaskDataset",
    "TrainingError",
]


def __getattr__(name: str) -> Any:
    """A public name, from its module: what it needs is heavy, and loads when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
