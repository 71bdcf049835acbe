"""The settings of a training run: what each means, and what it is unless it is set."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentenv_tinker.errors import ConfigError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def _setting(default: Any, meaning: str) -> Any:
    """A setting's default, and its meaning as the command line tells it too."""
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run. Values are checked as it is made; a bad one raises ConfigError, naming it."""

    bundle: str
    """A bundle's folder, or an installed bundle's name."""
    runs: Path = _setting(Path("runs"), "The folder that run folders go to.")
    run: str = _setting("", "The run's name and folder; empty for the bundle's name and the time.")
    model: str = _setting(DEFAULT_MODEL, "The base model, as the Tinker service names it.")
    renderer: str = _setting("", "The cookbook's renderer; empty for the one it recommends for the model.")
    train_split: str = _setting(
        "", "The eval to train on, or `all`; empty for the eval `train` where there is one, else `all`."
    )
    eval_split: str = _setting("", "The eval to evaluate on; empty for the eval `held_out`.")
    reward: str = _setting("", "The step whose score is the reward; empty for the one score that a task records.")
    steps: int = _setting(4, "Training steps.")
    groups_per_batch: int = _setting(4, "Groups in a training step; a group plays one task.")
    group_size: int = _setting(8, "Rollouts in a group.")
    eval_tasks: int = _setting(40, "How many tasks of the eval split are played, the first ones; 0 for all.")
    eval_every: int = _setting(
        0, "Evaluate every so many steps too, besides before the first and after the last; 0 for those two alone."
    )
    learning_rate: float = _setting(5e-4, "The optimizer's learning rate.")
    lora_rank: int = _setting(32, "The adapter's rank.")
    temperature: float = _setting(1.0, "The temperature of the training rollouts.")
    max_tokens: int = _setting(128, "Tokens that the model may write in one message.")
    max_turn_messages: int = _setting(4, "Messages that the model may write in one turn.")
    max_concurrent_episodes: int = _setting(8, "Episodes under way at once.")
    sandbox: str = _setting("local", "The framework's sandbox provider.")
    seed: int = _setting(0, "Shuffles the training tasks.")

    def __post_init__(self) -> None:
        counts = ("steps", "groups_per_batch", "group_size", "lora_rank", "max_tokens", "max_turn_messages")
        for name in (*counts, "max_concurrent_episodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("eval_tasks", "eval_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("learning_rate", "temperature"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if not self.run:
            named = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(self.bundle).name).strip("-.") or "run"
            object.__setattr__(self, "run", f"{named}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.run) is None:
            raise ConfigError(f"run must be a plain name of letters, digits, '-', '_' and '.', not {self.run!r}")

    @property
    def folder(self) -> Path:
        """Where the run leaves everything."""
        return self.runs / self.run

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in self._items()}

    def _items(self) -> list[tuple[str, Any]]:
        return [(each.name, getattr(self, each.name)) for each in dataclasses.fields(self)]
