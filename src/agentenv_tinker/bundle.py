"""Reads a bundle as the tasks that can be played, or the reason that each of the others can't."""

import functools
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentenv_tinker import framework
from agentenv_tinker.episode import PlayableTask
from agentenv_tinker.errors import BundleError, boundary
from agentenv_tinker.reward import RewardRule, reward_problem

logger = logging.getLogger(__name__)

Source = str | Mapping[str, str]
"""A bundle's folder or an installed bundle's name, or a mapping of split name to either."""


@dataclass(frozen=True)
class Playable:
    """A bundle's splits, each with the tasks of it that can be played."""

    splits: Mapping[str, tuple[PlayableTask, ...]]
    left_out: Mapping[str, str]
    """Why each task that can't be played was left out, by its name."""

    def split(self, name: str) -> tuple[PlayableTask, ...]:
        """The tasks of split `name`.

        Raises BundleError for a split there isn't, one with nothing to play, and one with tasks that make no reward.
        """
        if name not in self.splits:
            raise BundleError(f"there is no split {name!r}; the splits are {', '.join(map(repr, self.splits))}")
        if not self.splits[name]:
            raise BundleError(f"split {name!r} has no task that can be played{self._reasons()}")
        unscored = {task.name: task.reward_problem for task in self.splits[name] if task.reward_problem is not None}
        if unscored:
            task, why = next(iter(unscored.items()))
            others = f", and so do {len(unscored) - 1} more" if len(unscored) > 1 else ""
            raise BundleError(f"task {task!r} of split {name!r} makes no reward: {why}{others}")
        return self.splits[name]

    def _reasons(self) -> str:
        return "".join(f"\n  {name}: {why}" for name, why in self.left_out.items())


def playable(source: Source, *, reward: RewardRule, sandbox: str | None, turn_seconds: float | None) -> Playable:
    """Prepare a bundle, once in this process, and read its tasks as episodes. Blocks for seconds to minutes.

    `turn_seconds` replaces the deadline of every prompt, which budgets an agent's run and not a trainer's.
    Raises BundleError with every problem found.
    """
    sources = {None: source} if isinstance(source, str) else dict(source)
    splits: dict[str, tuple[framework.PreparedTask, ...]] = {}
    for name, one in sources.items():
        prepared = _prepared(_resolved(one), sandbox)
        splits.update(prepared if name is None else {name: prepared["all"]})
    return _read(splits, reward, turn_seconds)


def _resolved(source: str) -> str:
    """A folder by its absolute path, so that a worker elsewhere on this machine finds it; a name as it is."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.is_dir() else source


@functools.cache
def _prepared(source: str, sandbox: str | None) -> dict[str, tuple[framework.PreparedTask, ...]]:
    with boundary(BundleError, f"bundle {source!r} can't be prepared", RuntimeError, ValueError, OSError):
        try:
            return framework.prepare(source, sandbox=sandbox)
        except framework.FrameworkBundleError as error:
            raise BundleError("\n".join(f"bundle {source!r}: {problem}" for problem in error.problems)) from error


def _read(
    splits: Mapping[str, tuple[framework.PreparedTask, ...]], reward: RewardRule, turn_seconds: float | None
) -> Playable:
    tasks: dict[str, PlayableTask] = {}
    left_out: dict[str, str] = {}
    for prepared in {task.task.id: task for split in splits.values() for task in split}.values():
        try:
            spec = framework.EpisodeSpec.from_task(
                prepared.task, turn_timeout=None if turn_seconds is None else math.ceil(turn_seconds)
            )
        except framework.EpisodeError as error:
            left_out[prepared.name] = str(error)
            continue
        scoring = framework.scoring_steps(prepared.task)
        problem = reward_problem(reward, scoring)
        tasks[prepared.task.id] = PlayableTask(prepared.name, prepared, spec, scoring, problem)
    _log(len(tasks), left_out)
    return Playable(
        {name: tuple(tasks[task.task.id] for task in split if task.task.id in tasks) for name, split in splits.items()},
        left_out,
    )


def _log(kept: int, left_out: Mapping[str, str]) -> None:
    for name, why in left_out.items():
        logger.warning("task %r is left out: %s", name, why)
    reasons = "; ".join(f"{count} x {why}" for why, count in Counter(left_out.values()).most_common(3))
    logger.info("%d tasks can be played, %d are left out%s", kept, len(left_out), f" ({reasons})" if reasons else "")
