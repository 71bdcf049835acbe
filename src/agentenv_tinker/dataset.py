"""The cookbook's dataset over a bundle: seeded batches of groups, a group playing one task.

Group builders are pickleable and hold nothing live: in a worker process they prepare the bundle anew, once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import chz
from tinker_cookbook import checkpoint_utils
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.model_info import get_model_attributes
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, RLDataset, RLDatasetBuilder, Trajectory
from tinker_cookbook.tokenizer_utils import get_tokenizer, is_tokenizer_registered, register_tokenizer

from agentenv_tinker import records
from agentenv_tinker.bundle import Playable, PlayableTask, PlayRule, Skills, Source, playable
from agentenv_tinker.env import EpisodeEnv, RolloutRules
from agentenv_tinker.episode import AHEAD_SECONDS, Deadlines, EpisodeRun
from agentenv_tinker.errors import ConfigError
from agentenv_tinker.reward import RewardRule, reward_of
from agentenv_tinker.rollout import RolloutEnv

logger = logging.getLogger(__name__)

_loading = threading.Lock()  # transformers can't be imported by several threads at once
_LONGEST_ROLLOUT_SECONDS = 12 * 3600  # where no limit bounds one; hosted sandboxes live a day at most


@chz.chz
class PlaySettings(RolloutRules):
    """How every group of a run plays its episodes, the rules of a rollout included."""

    bundle: Source
    run_name: str = "run"
    """What the framework's run index files the episodes under."""
    model_name: str
    renderer_name: str
    tokenizer_path: str | None = None
    """A folder that holds the model's tokenizer, for a model that is on no hub; None to find it by `model_name`."""
    reward: RewardRule = None
    """A step's id, a module's function of the scores by step id, or None for the one score that a task records."""
    trainer_agents: tuple[str, ...] = ()
    """The agent that is played, where tasks prompt several; with more names, the one that a task prompts."""
    skills: Skills = "show"
    """Whether the model is shown the skills that a task brings, or tasks with skills are left out."""
    sandbox: str | None = "local"
    """The framework's sandbox provider, or None for its configured default."""
    max_concurrent_episodes: int = 8
    """Episodes under way at once, of all groups and splits together; in each worker of an executor."""
    deadlines: Deadlines = Deadlines()

    @chz.validate
    def _at_least_one(self) -> None:
        """chz's own validation at construction: counts that can't be."""
        for name in ("max_concurrent_episodes", "max_turn_messages", "max_tool_chars"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)}")

    def playable(self) -> Playable:
        """The bundle's playable tasks, prepared in this process if they aren't yet. Blocks. Raises BundleError."""
        seconds = (self.rollout_seconds or _LONGEST_ROLLOUT_SECONDS) + AHEAD_SECONDS
        rule = PlayRule(
            reward=self.reward,
            trainer_agents=self.trainer_agents,
            skills=self.skills,
            turn_seconds=math.ceil(seconds + self.deadlines.call + self.deadlines.end),
            sandbox_seconds=math.ceil(self.deadlines.start + seconds + self.deadlines.call + 2 * self.deadlines.end),
        )
        return playable(self.bundle, rule=rule, sandbox=self.sandbox)

    def renderer(self) -> Renderer:
        """The renderer over the model's tokenizer, loaded once in this process. Blocks."""
        if self.tokenizer_path is not None and not is_tokenizer_registered(self.model_name):
            register_tokenizer(self.model_name, functools.partial(_load_tokenizer, self.tokenizer_path))
        with _loading:
            return _renderer(self.renderer_name, self.model_name)


@dataclass
class _Step:
    """The training step that a run is at, shared by its train and test datasets."""

    value: int


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
    step: int | _Step
    """The training step that the group is for; an eval group, played again at later steps, reads it as it is played."""
    played: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    """Called in this process once the group was played."""
    _early: list[EpisodeRun] = field(default_factory=list, init=False, repr=False, compare=False)
    _made: list[RolloutEnv] = field(default_factory=list, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: everything but what is live here, and the step it is at."""
        return {**self.__dict__, "played": None, "_early": [], "_made": [], "step": self._step()}

    def start_ahead(self) -> None:
        """Start the group's episodes as slots are free, for `make_envs` to find them at their first turn."""
        task = self.settings.playable().split(self.split)[self.index]
        for _ in range(self.size):
            self._early.append(self._run(task))
            self._early[-1].start_ahead()

    def give_way(self) -> None:
        """Abandon in the background what was started ahead."""
        for run in self._early:
            run.give_way()
        self._early.clear()

    async def make_envs(self) -> Sequence[Env]:
        """`size` fresh rollouts. They start nothing before their first observation that wasn't started ahead."""
        task = (await asyncio.to_thread(self.settings.playable)).split(self.split)[self.index]
        renderer = await asyncio.to_thread(self.settings.renderer)
        early = list(self._early)
        usable = await asyncio.gather(*(run.claim() for run in early))
        runs = [run for run, used in zip(early, usable, strict=True) if used]
        runs += [self._run(task) for _ in range(self.size - len(runs))]
        made = [RolloutEnv(self._episode_env(run, renderer)) for run in runs]
        self._made.extend(made)
        self._early.clear()
        return made

    def _run(self, task: PlayableTask) -> EpisodeRun:
        settings = self.settings
        return EpisodeRun(
            task,
            sandbox=settings.sandbox,
            run_group=records.run_group(settings.run_name, self.part, self._step()),
            max_concurrent=settings.max_concurrent_episodes,
            deadlines=settings.deadlines,
        )

    def _episode_env(self, run: EpisodeRun, renderer: Renderer) -> EpisodeEnv:
        settings = self.settings
        reward = functools.partial(reward_of, settings.reward, scoring_steps=run.task.scoring_steps)
        return EpisodeEnv(run, renderer, reward, settings, settings.model_name)

    def _step(self) -> int:
        return self.step if isinstance(self.step, int) else self.step.value

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """What each rollout's steps haven't brought: 0.0, or the score of one that was cut outside of them.

        Raises EpisodeFailedError where one has none, so that nothing that failed trains as a 0.
        """
        rewards = await asyncio.gather(*(env.late_reward() for env in env_group if isinstance(env, RolloutEnv)))
        if self.played is not None:
            self.played()
        return list(rewards)

    async def cleanup(self) -> None:
        """Abandon every episode of the group's that isn't over, those of retried rollouts included. Raises nothing."""
        self.give_way()
        made, self._made[:] = list(self._made), []
        ended = await asyncio.gather(*(env.abandon("the group is over") for env in made), return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                logger.warning("an episode of task %d of split %r was not torn down: %s", self.index, self.split, error)

    def logging_tags(self) -> list[str]:
        return [self.part]


@dataclass(frozen=True)
class _Upcoming:
    """The batch that was started ahead."""

    index: int
    step: int
    groups: list[EpisodeGroupBuilder]


class TaskDataset(RLDataset):
    """Batches of groups over a split's tasks: shuffled anew each epoch by the seed, in order without one.

    The episodes of the next training batch may start once a group of the batch before was played in this process.
    """

    def __init__(
        self,
        group: EpisodeGroupBuilder,
        *,
        at: _Step,
        tasks: int,
        batch: int,
        epochs: int,
        seed: int | None,
        ahead: int,
    ) -> None:
        """`ahead` is the step at which training ends, before which the next batch starts ahead; 0 for none."""
        self._group = group
        self._at = at
        self._batch = batch
        self._ahead = ahead
        self._upcoming: _Upcoming | None = None
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
        if self._group.part == "eval":
            return [replace(self._group, index=task) for task in self._tasks(index)]
        step = self._at.value if self._at.value % len(self) == index else index  # a trainer may go round more than once
        self._at.value = step + 1  # an evaluation from here on is of a model that this batch has trained
        upcoming, self._upcoming = self._upcoming, None
        if upcoming is not None:
            if (upcoming.index, upcoming.step) == (index, step):
                return upcoming.groups
            for group in upcoming.groups:
                group.give_way()
        return self._groups(index, step)

    def _groups(self, index: int, step: int) -> list[EpisodeGroupBuilder]:
        played = functools.partial(self._start_ahead, index + 1, step + 1)
        return [replace(self._group, index=task, step=step, played=played) for task in self._tasks(index)]

    def _tasks(self, index: int) -> list[int]:
        return self._order[index * self._batch : (index + 1) * self._batch]

    def _start_ahead(self, index: int, step: int) -> None:
        """Start batch `index`, if it is the next one and was not started yet."""
        if self._upcoming is not None or self._at.value != step or step >= self._ahead or index >= len(self):
            return
        self._upcoming = _Upcoming(index, step, self._groups(index, step))
        for group in self._upcoming.groups:
            group.start_ahead()


@chz.chz
class AgentEnvDatasetBuilder(PlaySettings, RLDatasetBuilder):
    """Builds the training dataset of a bundle, and the test dataset where there is a test split.

    A split is an eval of the bundle, or `all`: every task of it. Where `bundle` is a mapping, its names are the splits.
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
    """Shuffles the training tasks, differently in each epoch."""
    max_steps: int | None = None
    """The trainer's own `max_steps`, until which the next batch's episodes start while slots are free and the model
    trains; None to start none ahead, since a trainer that ends before them would leave them up."""
    log_path: str | None = None
    """The trainer's own `log_path`, by which a resumed run's first evaluation is filed under its true step."""

    @chz.validate
    def _positive_counts(self) -> None:
        """chz's own validation at construction: counts that can't be."""
        for name in ("groups_per_batch", "group_size", "eval_group_size", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)}")

    async def __call__(self) -> tuple[TaskDataset, TaskDataset | None]:
        """The (train, test) datasets. Raises BundleError for a bundle or split that can't be played."""
        bundle = await asyncio.to_thread(self.playable)
        at = _Step(self._first_step())
        train = self._train(at, len(bundle.split(self.train_split)))
        return train, None if self.test_split is None else self._test(at, len(bundle.split(self.test_split)))

    def _first_step(self) -> int:
        """The step that training starts from: its last checkpoint's, where there is one."""
        checkpoint = checkpoint_utils.get_last_checkpoint(self.log_path) if self.log_path is not None else None
        return checkpoint.batch or 0 if checkpoint is not None else 0

    def _train(self, at: _Step, tasks: int) -> TaskDataset:
        group = EpisodeGroupBuilder(self, self.train_split, index=0, size=self.group_size, part="train", step=0)
        return TaskDataset(
            group,
            at=at,
            tasks=tasks,
            batch=self.groups_per_batch,
            epochs=self.epochs,
            seed=self.seed,
            ahead=self.max_steps or 0,
        )

    def _test(self, at: _Step, tasks: int) -> TaskDataset:
        assert self.test_split is not None
        group = EpisodeGroupBuilder(self, self.test_split, index=0, size=self.eval_group_size, part="eval", step=at)
        held = tasks if self.eval_tasks is None else min(self.eval_tasks, tasks)
        return TaskDataset(group, at=at, tasks=held, batch=self.groups_per_batch, epochs=1, seed=None, ahead=0)


@functools.cache
def _renderer(name: str, model_name: str) -> Renderer:
    tokenizer = _one_thread_at_a_time(get_tokenizer(model_name))
    return get_renderer(name, tokenizer, _image_processor(model_name), model_name=model_name)


def _one_thread_at_a_time(tokenizer: Any) -> Any:
    """`tokenizer` with a lock around `encode`.

    The cookbook renders each rollout's prompts in a thread, and a fast tokenizer raises "Already borrowed" where
    another thread encodes while it sets its options, as it does in each call.
    """
    lock, encode = threading.Lock(), tokenizer.encode

    def locked(*args: Any, **options: Any) -> Any:
        with lock:
            return encode(*args, **options)

    tokenizer.encode = locked
    return tokenizer


def _image_processor(model_name: str) -> Any:
    """The image processor of a vision model, and None for any other."""
    try:
        takes_images = get_model_attributes(model_name).is_vl
    except (ConfigurationError, KeyError, ValueError):  # a model that the cookbook doesn't know
        return None
    return get_image_processor(model_name) if takes_images else None


def _load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(path))
