"""The cookbook's dataset over a bundle: seeded batches of groups, a group playing one task.

Group builders are pickleable and hold nothing live: in a worker process they prepare the bundle anew, once.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import chz
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, RLDataset, RLDatasetBuilder, Trajectory
from tinker_cookbook.tokenizer_utils import get_tokenizer, is_tokenizer_registered, register_tokenizer

from agentenv_tinker import records
from agentenv_tinker.bundle import Playable, Source, playable
from agentenv_tinker.env import EpisodeEnv, RolloutEnv, RolloutRules
from agentenv_tinker.episode import Deadlines, EpisodeRun, PlayableTask
from agentenv_tinker.errors import ConfigError
from agentenv_tinker.reward import RewardRule, reward_of


@chz.chz
class PlaySettings(RolloutRules):
    """How every group of a run plays its episodes, the rules of a rollout included."""

    bundle: Source
    run_name: str
    model_name: str
    renderer_name: str
    tokenizer_path: str | None = None
    """A folder that holds the model's tokenizer, for a model that is on no hub; None to find it by `model_name`."""
    reward: RewardRule = None
    sandbox: str | None = "local"
    max_concurrent_episodes: int = 8
    """Episodes under way at once, of all groups and splits together."""
    deadlines: Deadlines = Deadlines()

    def playable(self) -> Playable:
        """The bundle's playable tasks, prepared in this process if they aren't yet. Blocks. Raises BundleError."""
        seconds = self.rollout_seconds
        return playable(
            self.bundle,
            reward=self.reward,
            sandbox=self.sandbox,
            # a prompt's own deadline budgets an agent's run; a training model's is the rollout's
            turn_seconds=24 * 3600 if seconds is None else seconds + self.deadlines.end,
        )

    def renderer(self) -> Renderer:
        """The renderer over the model's tokenizer, loaded once in this process. Blocks."""
        if self.tokenizer_path is not None and not is_tokenizer_registered(self.model_name):
            register_tokenizer(self.model_name, functools.partial(_load_tokenizer, self.tokenizer_path))
        return _renderer(self.renderer_name, self.model_name)


@dataclass(frozen=True)
class EpisodeGroupBuilder(EnvGroupBuilder):
    """A group of rollouts of one task."""

    settings: PlaySettings
    split: str
    index: int
    """The task's place in the split."""
    size: int
    part: str
    """"train" or "eval"."""
    step: int | None
    """The training step that the group is for; None for an evaluation's, which is played again at later steps."""
    _made: list[RolloutEnv] = field(default_factory=list, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: everything but the envs made here, and the step it is at."""
        return {**self.__dict__, "_made": [], "step": self._step()}

    async def make_envs(self) -> Sequence[Env]:
        """`size` fresh rollouts. They start nothing before their first observation."""
        task = (await asyncio.to_thread(self.settings.playable)).split(self.split)[self.index]
        renderer = await asyncio.to_thread(self.settings.renderer)
        made = [RolloutEnv(self._episode_env(task, renderer)) for _ in range(self.size)]
        self._made.extend(made)
        return made

    def _episode_env(self, task: PlayableTask, renderer: Renderer) -> EpisodeEnv:
        settings = self.settings
        run = EpisodeRun(
            task,
            sandbox=settings.sandbox,
            run_group=records.run_group(settings.run_name, self.part, self._step()),
            max_concurrent=settings.max_concurrent_episodes,
            deadlines=settings.deadlines,
        )
        reward = functools.partial(_reward, settings.reward, task.scoring_steps)
        return EpisodeEnv(run, renderer, reward, settings, settings.model_name)

    def _step(self) -> int:
        return _steps.get(self.settings.run_name, 0) if self.step is None else self.step

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """0.0 for each rollout, whose steps carry its reward; a rollout that its runner cut is scored here."""
        return [await _late_score(env) for env in env_group]

    async def cleanup(self) -> None:
        """Abandon every episode of the group's that isn't over, those of retried rollouts included."""
        made, self._made[:] = list(self._made), []
        await asyncio.gather(*(env.abandon("the group is over") for env in made))

    def logging_tags(self) -> list[str]:
        return [self.part]


class TaskDataset(RLDataset):
    """Batches of groups over a split's tasks: shuffled anew each epoch by the seed, in order without one."""

    def __init__(self, group: EpisodeGroupBuilder, *, tasks: int, batch: int, epochs: int, seed: int | None) -> None:
        self._group = group
        self._batch = batch
        self._order: list[int] = []
        for epoch in range(epochs):
            indices = list(range(tasks))
            if seed is not None:
                random.Random(f"{seed}/{epoch}").shuffle(indices)
            self._order += indices

    def __len__(self) -> int:
        return math.ceil(len(self._order) / self._batch)

    def get_batch(self, index: int) -> list[EpisodeGroupBuilder]:
        """The groups of batch `index`; the last batch holds what is left. Raises IndexError past it."""
        if not 0 <= index < len(self):
            raise IndexError(f"there is no batch {index}; the dataset has {len(self)}")
        if self._group.part == "train":
            _steps[self._group.settings.run_name] = index + 1
        chosen = self._order[index * self._batch : (index + 1) * self._batch]
        step = index if self._group.part == "train" else None
        return [replace(self._group, index=task, step=step) for task in chosen]


@chz.chz
class AgentEnvDatasetBuilder(PlaySettings, RLDatasetBuilder):
    """Builds the training dataset of a bundle, and the test dataset where there is a test split.

    A split is an eval of the bundle, or `all`: every task of it.
    """

    train_split: str = "all"
    test_split: str | None = None
    groups_per_batch: int = 4
    group_size: int = 8
    eval_group_size: int = 1
    """How often the test set plays each task."""
    eval_tasks: int | None = None
    """How many of the test split's tasks the test set holds, the first ones; None for all."""
    epochs: int = 1
    seed: int = 0

    async def __call__(self) -> tuple[TaskDataset, TaskDataset | None]:
        """The (train, test) datasets. Raises BundleError for a bundle or split that can't be played."""
        bundle = await asyncio.to_thread(self.playable)
        train = self._dataset(bundle, self.train_split, "train")
        return train, None if self.test_split is None else self._dataset(bundle, self.test_split, "eval")

    def _dataset(self, bundle: Playable, split: str, part: str) -> TaskDataset:
        tasks = len(bundle.split(split))
        training = part == "train"
        size = self.group_size if training else self.eval_group_size
        if size < 1 or self.groups_per_batch < 1:
            raise ConfigError(f"group sizes and groups per batch start at 1, not {size} and {self.groups_per_batch}")
        group = EpisodeGroupBuilder(self, split, index=0, size=size, part=part, step=None)
        if training:
            return TaskDataset(group, tasks=tasks, batch=self.groups_per_batch, epochs=self.epochs, seed=self.seed)
        held = tasks if self.eval_tasks is None else min(self.eval_tasks, tasks)
        return TaskDataset(group, tasks=held, batch=self.groups_per_batch, epochs=1, seed=None)


_steps: dict[str, int] = {}  # the next training step of each run of this process, by run name


async def _late_score(env: Env) -> tuple[float, Metrics]:
    if not isinstance(env, RolloutEnv) or env.episode.run.over:
        return 0.0, {}
    return await env.score_cut()


def _reward(rule: RewardRule, scoring_steps: tuple[str, ...], scores: dict[str, float]) -> float:
    return reward_of(rule, scores, scoring_steps)


@functools.cache
def _renderer(name: str, model_name: str) -> Renderer:
    return get_renderer(name, get_tokenizer(model_name), model_name=model_name)


def _load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(path))
