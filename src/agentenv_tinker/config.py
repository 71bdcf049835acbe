"""The settings of a training run: what each means, and what it is unless it is set."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from agentenv_tinker.errors import ConfigError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run. Values are checked as it is made; a bad one raises ConfigError, naming it.

    Each setting's meaning is in its annotation, from which the command line has it too.
    """

    bundle: Annotated[str, "A bundle's folder, or an installed bundle's name."]
    runs: Annotated[Path, "The folder that run folders go to."] = Path("runs")
    run: Annotated[str, "The run's name and folder; empty for the bundle's name and the time."] = ""
    model: Annotated[str, "The base model, as the Tinker service names it."] = DEFAULT_MODEL
    renderer: Annotated[str, "The cookbook's renderer; empty for the one it recommends for the model."] = ""
    train_split: Annotated[
        str, "The eval to train on, or `all`; empty for the eval `train` where there is one, else `all`."
    ] = ""
    eval_split: Annotated[str, "The eval to evaluate on; empty for the eval `held_out`."] = ""
    reward: Annotated[str, "The step whose score is the reward; empty for the one score that a task records."] = ""
    steps: Annotated[int, "Training steps."] = 3
    groups_per_batch: Annotated[int, "Groups in a training step; a group plays one task."] = 4
    group_size: Annotated[int, "Rollouts in a group."] = 4
    eval_tasks: Annotated[int, "How many tasks of the eval split are played, the first ones; 0 for all."] = 20
    eval_every: Annotated[
        int, "Evaluate every so many steps too, besides before the first and after the last; 0 for those two alone."
    ] = 0
    learning_rate: Annotated[float, "The optimizer's learning rate."] = 5e-4
    lora_rank: Annotated[int, "The adapter's rank."] = 32
    temperature: Annotated[float, "The temperature of the training rollouts."] = 1.0
    max_tokens: Annotated[int, "Tokens that the model may write in one message."] = 128
    max_trajectory_tokens: Annotated[int, "Tokens that a rollout may hold, the next message's included."] = 8192
    max_turn_messages: Annotated[int, "Messages that the model may write in one turn."] = 4
    max_concurrent_episodes: Annotated[int, "Episodes under way at once."] = 8
    sandbox: Annotated[str, "The framework's sandbox provider; `pool` keeps env containers warm."] = "pool"
    seed: Annotated[int, "Shuffles the training tasks."] = 0

    def __post_init__(self) -> None:
        counts = ("steps", "groups_per_batch", "group_size", "lora_rank", "max_tokens", "max_turn_messages")
        for name in (*counts, "max_trajectory_tokens", "max_concurrent_episodes"):
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
