"""Reads a bundle as the tasks that can be played, or the reason that each of the others can't."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentenv_tinker import framework
from agentenv_tinker.errors import BundleError, boundary
from agentenv_tinker.reward import RewardRule, reward_problem

logger = logging.getLogger(__name__)

Source = str | Mapping[str, str]
"""A bundle's folder or an installed bundle's name, or a mapping of split name to either."""
Skills = Literal["show", "leave_out"]

_NAMED = 5  # how many tasks an error names of those it is about
_preparing = threading.Lock()  # a bundle is prepared once in a process, whichever thread asks first


@dataclass(frozen=True)
class PlayRule:
    """What a run makes of a bundle's tasks."""

    reward: RewardRule
    trainer_agents: tuple[str, ...]
    """The agents that may be played, one of which a task must prompt; empty where tasks prompt a single one."""
    skills: Skills
    turn_seconds: int
    """The deadline of a played prompt, in place of its own, which budgets an agent's run and not a trainer's."""
    sandbox_seconds: int
    """The least that a run's sandboxes live."""


@dataclass(frozen=True)
class PlayableTask:
    """A task that can be played, with what a run of it needs."""

    name: str
    prepared: framework.PreparedTask
    spec: framework.EpisodeSpec
    agent: str
    """The agent that is played."""
    scoring_steps: tuple[str, ...]
    reward_problem: str | None
    """Why its scores make no reward under the run's rule, or None where they do."""
    skills: tuple[str, ...]
    """The names of the skills that the task gives the played agent, in whichever turn."""


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
            reasons = [f"  {listed(names)}: {why}" for why, names in by_reason(self.left_out).items()]
            raise BundleError("\n".join([f"split {name!r} has no task that can be played", *reasons]))
        unscored = {task.name: task.reward_problem for task in self.splits[name] if task.reward_problem is not None}
        if unscored:
            task, why = next(iter(unscored.items()))
            others = f", and so do {len(unscored) - 1} more" if len(unscored) > 1 else ""
            raise BundleError(f"task {task!r} of split {name!r} makes no reward: {why}{others}")
        return self.splits[name]


def playable(source: Source, *, rule: PlayRule, sandbox: str | None) -> Playable:
    """Prepare a bundle, once in this process, and read its tasks as episodes. Blocks for seconds to minutes.

    Raises BundleError with every problem found.
    """
    sources = ((None, source),) if isinstance(source, str) else tuple(source.items())
    with _preparing:
        return _playable(tuple((split, _resolved(one)) for split, one in sources), rule, sandbox)


def _resolved(source: str) -> str:
    """A folder by its absolute path, so that a worker elsewhere on this machine finds it; a name as it is."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.is_dir() else source


@functools.cache
def _playable(sources: tuple[tuple[str | None, str], ...], rule: PlayRule, sandbox: str | None) -> Playable:
    splits: dict[str, tuple[framework.PreparedTask, ...]] = {}
    for split, source in sources:
        prepared = _prepared(source, sandbox)
        splits.update(prepared if split is None else {split: prepared["all"]})
    tasks, left_out = _read((task for split in splits.values() for task in split), rule)
    _log(len(tasks), left_out)
    return Playable(
        {name: tuple(tasks[task.task.id] for task in split if task.task.id in tasks) for name, split in splits.items()},
        left_out,
    )


@functools.cache
def _prepared(source: str, sandbox: str | None) -> dict[str, tuple[framework.PreparedTask, ...]]:
    with boundary(BundleError, f"bundle {source!r} can't be prepared", RuntimeError, ValueError, OSError):
        try:
            return framework.prepare(source, sandbox=sandbox)
        except framework.FrameworkBundleError as error:
            raise BundleError("\n".join(f"bundle {source!r}: {problem}" for problem in error.problems)) from error


def _read(prepared: Iterable[framework.PreparedTask], rule: PlayRule) -> tuple[dict[str, PlayableTask], dict[str, str]]:
    """The tasks that can be played, by id, and why each other can't, by name."""
    tasks: dict[str, PlayableTask] = {}
    left_out: dict[str, str] = {}
    for one in {task.task.id: task for task in prepared}.values():
        try:
            tasks[one.task.id] = _task(one, rule)
        except framework.EpisodeError as error:
            left_out[one.name] = str(error).replace(f"task {one.task.id!r}", "it")
    return tasks, left_out


def _task(prepared: framework.PreparedTask, rule: PlayRule) -> PlayableTask:
    """`prepared` as `rule` plays it. Raises EpisodeError with why it can't be."""
    agent = _played_agent(prepared.task, rule.trainer_agents)
    spec = framework.episode_spec(
        prepared, agent=agent, turn_seconds=rule.turn_seconds, sandbox_seconds=rule.sandbox_seconds
    )
    [agent] = spec.trainer_agents
    skills = framework.skill_names(prepared.task, agent)
    if skills and rule.skills == "leave_out":
        raise framework.EpisodeError(f"it has skills ({', '.join(skills)}), and skills='leave_out'")
    scoring = framework.scoring_steps(prepared.task)
    return PlayableTask(prepared.name, prepared, spec, agent, scoring, reward_problem(rule.reward, scoring), skills)


def _played_agent(task: framework.Task, named: tuple[str, ...]) -> str | None:
    """The one of the `named` agents that `task` prompts; None, for its only one, where none is named."""
    if not named:
        return None
    prompted = framework.prompted_agents(task)
    played = [name for name in named if name in prompted]
    if len(played) != 1:
        which = "none of them" if not played else "more than one"
        raise framework.EpisodeError(
            f"it prompts {', '.join(map(repr, prompted)) or 'no agent'}, and trainer_agents={list(named)} names {which}"
        )
    return played[0]


def _log(kept: int, left_out: Mapping[str, str]) -> None:
    for name, why in left_out.items():
        logger.warning("task %r is left out: %s", name, why)
    reasons = "; ".join(f"{count} because {why}" for why, count in Counter(left_out.values()).most_common())
    logger.info("%d tasks can be played, %d are left out%s", kept, len(left_out), f": {reasons}" if reasons else "")


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """The tasks of each reason."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for name, why in reasons.items():
        grouped[why].append(name)
    return grouped


def listed(names: Sequence[str]) -> str:
    """Tasks by name, the first few and how many more."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"task{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:_NAMED]))}{more}"
