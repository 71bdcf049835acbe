"""The settings of a command: what each means, and what it is unless it is set."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from agentenv_tinker.errors import ConfigError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True)
class PlayConfig:
    """What is played, and how. Values are checked as it is made; a bad one raises ConfigError, naming it.

    Each setting's meaning is in its annotation, from which the command line has it too.
    """

    bundle: Annotated[str, "A bundle's folder, or an installed bundle's name."]
    runs: Annotated[Path, "The folder that run folders go to."] = Path("runs")
    run: Annotated[str, "The run's name and folder; empty for the bundle's name and the time."] = ""
    model: Annotated[str, "The base model, as the Tinker service names it."] = DEFAULT_MODEL
    renderer: Annotated[str, "The cookbook's renderer; empty for the one it recommends for the model."] = ""
    reward: Annotated[str, "The step whose score is the reward; empty for the one score that a task records."] = ""
    max_tokens: Annotated[int, "Tokens that the model may write in one message."] = 128
    max_trajectory_tokens: Annotated[int, "Tokens that a rollout may hold, the next message's included."] = 8192
    max_turn_messages: Annotated[int, "Messages that the model may write in one turn."] = 4
    max_concurrent_episodes: Annotated[
        int, "Episodes under way at once; in each rollout worker, where there are any."
    ] = 8
    sandbox: Annotated[str, "The framework's sandbox provider; `pool` keeps env containers warm."] = "pool"

    def __post_init__(self) -> None:
        self._at_least(1, "max_tokens", "max_turn_messages", "max_trajectory_tokens", "max_concurrent_episodes")
        if not self.run:
            named = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(self.bundle).name).strip("-.") or "run"
            object.__setattr__(self, "run", f"{named}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.run) is None:
            raise ConfigError(f"run must be a plain name of letters, digits, '-', '_' and '.', not {self.run!r}")

    def _at_least(self, least: int, *names: str) -> None:
        for name in names:
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} must be {least} or more, not {getattr(self, name)}")

    def _above_0(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")

    def _finite(self, *rewards: float) -> None:
        for reward in rewards:
            if not math.isfinite(reward):
                raise ConfigError(f"a reward to compare with must be a finite number, not {reward}")

    @property
    def folder(self) -> Path:
        """Where the run leaves everything."""
        return self.runs / self.run

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in self._items()}

    def _items(self) -> list[tuple[str, Any]]:
        return [(each.name, getattr(self, each.name)) for each in dataclasses.fields(self)]


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(PlayConfig):
    """A warm start: supervised learning on a bundle's demonstrations."""

    train_split: Annotated[
        str, "The eval to train on, or `all`; empty for the eval `train` where there is one, else `all`."
    ] = ""
    demonstrations: Annotated[str, "The file of demonstrations; empty for the bundle's `demonstrations.jsonl`."] = ""
    min_score: Annotated[float, "The least score of a replayed demonstration to learn from."] = 1.0
    warm_start_steps: Annotated[int, "Supervised steps on the demonstrations."] = 40
    warm_start_batch: Annotated[int, "Demonstrations in a supervised step."] = 16
    warm_start_learning_rate: Annotated[float, "The supervised learning rate, which falls to 0 by the end."] = 1e-3
    lora_rank: Annotated[int, "The adapter's rank."] = 32
    seed: Annotated[int, "Shuffles the training tasks and the demonstrations."] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "warm_start_batch", "lora_rank")
        self._at_least(0, "warm_start_steps")
        self._above_0("warm_start_learning_rate")
        self._finite(self.min_score)


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(PlayConfig):
    """What is evaluated on, and by which measures."""

    eval_split: Annotated[str, "The eval to evaluate on, or `all`; empty for the eval `held_out`."] = ""
    eval_tasks: Annotated[int, "How many tasks of the eval split are played, the first ones; 0 for all."] = 20
    pass_threshold: Annotated[float, "The least reward of an episode that passes, as pass@k counts it."] = 1.0
    above: Annotated[
        tuple[float, ...], "A reward, of which evaluations tell the share of episodes above it; give it once for each."
    ] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "eval_tasks")
        self._finite(self.pass_threshold, *self.above)


@dataclass(frozen=True, kw_only=True)
class RunConfig(WarmStartConfig, MeasureConfig):
    """A training run."""

    checkpoint: Annotated[
        str, "The weights to go on from: a `tinker://` path of a training state, or a run's folder; empty for none."
    ] = ""
    warm_start_steps: Annotated[
        int, "Supervised steps on the demonstrations before RL, where no --from is given; 0 for none."
    ] = 0
    eval_base: Annotated[bool, "Evaluate the base model too, where RL starts from other weights."] = False
    eval_every: Annotated[
        int, "Evaluate every so many steps too, besides before the first and after the last; 0 for those two alone."
    ] = 0
    save_every: Annotated[
        int, "Save the training state, for `resume` to go on from, every so many steps; 0 for after the last alone."
    ] = 5
    steps: Annotated[int, "Training steps."] = 3
    groups_per_batch: Annotated[int, "Groups in a training step; a group plays one task."] = 4
    group_size: Annotated[int, "Rollouts in a group."] = 4
    rollout_workers: Annotated[
        int, "Processes that play the groups, one group each at a time; 0 for the trainer's."
    ] = 0
    sandbox_hosts: Annotated[
        tuple[str, ...], "A sandbox host for the workers, as DOCKER_HOST names it; give it once for each, used in turn."
    ] = ()
    ray: Annotated[str, "A Ray cluster to play the groups on: its address, `auto`, or `local`; empty for none."] = ""
    learning_rate: Annotated[float, "The optimizer's learning rate."] = 5e-4
    temperature: Annotated[float, "The temperature of the training rollouts."] = 1.0
    wandb_project: Annotated[
        str, "The Weights & Biases project that the metrics go to too; empty for none. Needs the extra `wandb`."
    ] = ""
    token_prices: Annotated[
        tuple[float, ...],
        "Dollars for a million tokens read, sampled and trained on, for the report's cost; give it three times.",
    ] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "steps", "groups_per_batch", "group_size")
        self._at_least(0, "eval_every", "save_every", "rollout_workers")
        if self.ray and self.rollout_workers:
            raise ConfigError("choose either rollout_workers or ray")
        if self.sandbox_hosts and not self.rollout_workers:
            raise ConfigError("sandbox_hosts are for rollout_workers: set how many")
        self._above_0("learning_rate", "temperature")
        if len(self.token_prices) not in (0, 3) or not all(0 <= price < math.inf for price in self.token_prices):
            raise ConfigError(
                f"token_prices must be three prices, for tokens read, sampled and trained on, not {self.token_prices}"
            )
        if self.wandb_project and importlib.util.find_spec("wandb") is None:
            raise ConfigError("wandb_project needs the package wandb: pip install 'agentenv-tinker[wandb]'")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(MeasureConfig):
    """An evaluation."""

    checkpoint: Annotated[
        str, "The weights to play: a `tinker://` path of sampler weights, or a run's folder; empty for the base model."
    ] = ""
    eval_tasks: Annotated[int, "How many tasks of the eval split are played, the first ones; 0 for all."] = 0
    eval_temperature: Annotated[float, "The temperature of the episodes; 0 for the likeliest tokens."] = 1.0
    samples: Annotated[int, "How often each task is played."] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "samples")
        self._at_least(0, "eval_temperature")
