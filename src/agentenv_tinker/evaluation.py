"""What an evaluation came to: worked out from the rollouts that the cookbook recorded, and kept as JSON.

An episode that failed has no reward. It is counted and named, and is no part of any mean.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from agentenv_tinker.errors import ConfigError, EpisodeFailedError, boundary

TOLERANCE = 1e-9  # rewards are sums of floats: a 1 may be recorded as 0.9999999999999999
UNKNOWN_STOP = "unknown"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is evaluated, on what, and by which measures."""

    label: str
    step: int | None
    """The training steps behind the model; None where that isn't known."""
    model: str
    checkpoint: str | None
    """The weights, as a `tinker://` path; None for the base model, and for weights that were not kept."""
    split: str
    tasks: tuple[str, ...]
    """The names of the tasks, each of which is to be played `samples` times."""
    samples: int = 1
    temperature: float = 1.0
    pass_threshold: float = 1.0
    """The least reward of an episode that passes."""
    thresholds: tuple[float, ...] = ()
    """Rewards, of each of which the share of episodes above it is told."""


@dataclass(frozen=True)
class Failure:
    """An episode that was to be played and has no reward."""

    task: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A recorded rollout, as far as an evaluation needs it."""

    task: str
    reward: float
    scores: Mapping[str, float]
    """Of each scoring step that was reached, by its id."""
    flags: Mapping[str, bool]
    """Whether it was cut, wrote a tool call that can't be parsed, and had an error answered by a tool."""
    amounts: Mapping[str, float]
    """Its messages, tokens and tool calls. A prompt is counted with each message that it was read for."""
    stop_reason: str


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The episodes of one task."""

    task: str
    rewards: tuple[float, ...]
    failed: int
    """How many of its episodes have no reward."""
    errors: tuple[str, ...] = ()
    """Why, where it is known."""

    @property
    def mean(self) -> float | None:
        """The mean reward, or None where every episode failed."""
        return statistics.fmean(self.rewards) if self.rewards else None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation came to. Every mean, share and rate is of the episodes that were scored."""

    label: str
    step: int | None
    model: str
    checkpoint: str | None
    split: str
    samples: int
    """How often each task was to be played."""
    temperature: float
    episodes: int
    """Those that were scored."""
    failed: int
    """Those that were to be played and have no reward."""
    mean: float
    """The mean reward of an episode."""
    standard_error: float | None
    """Of the mean, with the task as the unit that was sampled: the episodes of one task are no independent draws. None
    for a single task."""
    pass_threshold: float
    pass_at: Mapping[int, float]
    """By k: the chance that the best of k episodes of a task earns `pass_threshold` or more; see `pass_at_k`."""
    above: Mapping[float, float]
    """By threshold: the share of episodes with a reward strictly above it."""
    scores: Mapping[str, float]
    """By scoring step: the mean over the episodes that reached it."""
    rates: Mapping[str, float]
    """The share of episodes that were cut, that hold a call that can't be parsed, and that hold an error of a tool."""
    stop_reasons: Mapping[str, int]
    """How many episodes ended by each of the cookbook's stop reasons."""
    per_episode: Mapping[str, float]
    """Means: messages, prompt tokens, sampled tokens, tool calls."""
    tasks: tuple[TaskResult, ...]

    @property
    def line(self) -> str:
        """The evaluation in one line."""
        error = "" if self.standard_error is None else f" +/- {self.standard_error:.3f} (s.e.)"
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.mean:.3f}{error} over {_counted(self.episodes, 'episode')}{failed}"

    def to_dict(self) -> dict[str, Any]:
        """The evaluation as JSON values; numbers that are keys become strings."""
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("pass_at", "above"):
            known[name] = {str(key): value for key, value in known[name].items()}
        for name in ("scores", "rates", "stop_reasons", "per_episode"):
            known[name] = dict(known[name])
        tasks = [{each.name: getattr(task, each.name) for each in fields(task)} for task in self.tasks]
        known["tasks"] = [{**task, "rewards": list(task["rewards"]), "errors": list(task["errors"])} for task in tasks]
        return known

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> Evaluation:
        """What `to_dict` returned. Raises KeyError, TypeError or ValueError for anything else."""
        values = {each.name: known[each.name] for each in fields(cls)}
        values["pass_at"] = {int(k): float(value) for k, value in known["pass_at"].items()}
        values["above"] = {float(threshold): float(share) for threshold, share in known["above"].items()}
        values["tasks"] = tuple(
            TaskResult(
                task=str(task["task"]),
                rewards=tuple(map(float, task["rewards"])),
                failed=int(task["failed"]),
                errors=tuple(map(str, task["errors"])),
            )
            for task in known["tasks"]
        )
        return cls(**values)

    def write(self, path: Path) -> None:
        """Write the evaluation to `path`, as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """The evaluation that was written to `path`. Raises ConfigError for a file that isn't there or holds none."""
        with boundary(ConfigError, f"{str(path)!r} can't be read as an evaluation", OSError, ValueError):
            known = json.loads(path.read_text())
        try:
            return cls.from_dict(known)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{str(path)!r} holds no evaluation: {_lacking(error)}") from error


def _lacking(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def evaluation_of(plan: Plan, rollouts: Sequence[Rollout], failures: Sequence[Failure] = ()) -> Evaluation:
    """What the `rollouts` of `plan` come to; `failures` are those that are known of the episodes missing from them.

    Raises EpisodeFailedError where there is no rollout at all: no reward is not a reward of 0.
    """
    if not rollouts:
        planned = _counted(len(plan.tasks) * plan.samples, "episode")
        why = f"the first: {failures[0].why}" if failures else "see the log"
        raise EpisodeFailedError(f"not one of {planned} of evaluation {plan.label!r} was scored; {why}")
    rewards = [each.reward for each in rollouts]
    tasks = tuple(_task_results(plan, rollouts, failures))
    by_task = [task.rewards for task in tasks if task.rewards]
    return Evaluation(
        label=plan.label,
        step=plan.step,
        model=plan.model,
        checkpoint=plan.checkpoint,
        split=plan.split,
        samples=plan.samples,
        temperature=plan.temperature,
        episodes=len(rollouts),
        failed=sum(task.failed for task in tasks),
        mean=statistics.fmean(rewards),
        standard_error=clustered_error(by_task),
        pass_threshold=plan.pass_threshold,
        pass_at=_pass_at(by_task, plan),
        above={each: _share(reward > each + TOLERANCE for reward in rewards) for each in sorted(plan.thresholds)},
        scores=_means(each.scores for each in rollouts),
        rates=_means(each.flags for each in rollouts),
        stop_reasons=dict(Counter(each.stop_reason for each in rollouts).most_common()),
        per_episode=_means(each.amounts for each in rollouts),
        tasks=tasks,
    )


def _task_results(plan: Plan, rollouts: Sequence[Rollout], failures: Sequence[Failure]) -> Iterator[TaskResult]:
    """Each planned task, in the plan's order."""
    rewards, errors = defaultdict(list), defaultdict(list)
    for each in rollouts:
        rewards[each.task].append(each.reward)
    for failure in failures:
        errors[failure.task].append(failure.why)
    for task in plan.tasks:
        scored = tuple(rewards[task])
        yield TaskResult(
            task=task, rewards=scored, failed=max(plan.samples - len(scored), 0), errors=tuple(errors[task])
        )


def clustered_error(clusters: Sequence[Sequence[float]]) -> float | None:
    """The standard error of the mean of all values, which come in `clusters` of dependent ones; None for a single one.

    The cluster-robust error of a mean: with m the mean of all N values, and s_c the sum of (value - m) in cluster c of
    C, the square root of C / (C - 1) * sum(s_c ** 2), over N. With one value a cluster it is the sample's standard
    deviation over the root of N.
    """
    values = [value for cluster in clusters for value in cluster]
    count = len(clusters)
    if count < 2:
        return None
    mean = statistics.fmean(values)
    spread = math.fsum((math.fsum(cluster) - mean * len(cluster)) ** 2 for cluster in clusters)
    return math.sqrt(count / (count - 1) * spread) / len(values)


def _pass_at(by_task: Sequence[Sequence[float]], plan: Plan) -> dict[int, float]:
    """pass@k for each k up to the samples: the mean over the tasks that have k scored episodes or more."""
    least = plan.pass_threshold - TOLERANCE
    passed = [(len(rewards), sum(reward >= least for reward in rewards)) for rewards in by_task]
    known: dict[int, float] = {}
    for k in range(1, plan.samples + 1):
        chances = [pass_at_k(played, good, k) for played, good in passed if played >= k]
        if chances:
            known[k] = statistics.fmean(chances)
    return known


def pass_at_k(played: int, passed: int, k: int) -> float:
    """The unbiased estimate of the chance that one of `k` episodes passes, of `played` >= k episodes, `passed` of which
    did: the share of the choices of k of them that hold one that passed (Chen et al. 2021, arXiv:2107.03374)."""
    return 1 - math.comb(played - passed, k) / math.comb(played, k)


def _share(claims: Iterable[bool]) -> float:
    return statistics.fmean(map(float, claims))


def _means(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name's values, over the mappings that have it."""
    values = defaultdict(list)
    for mapping in mappings:
        for name, value in mapping.items():
            values[name].append(float(value))
    return {name: statistics.fmean(each) for name, each in sorted(values.items())}


def read_rollouts(path: Path) -> list[Rollout]:
    """The rollouts of a `*_rollout_summaries.jsonl` of the cookbook's, in its order. Raises ConfigError."""
    with boundary(ConfigError, f"{str(path)!r} can't be read as rollouts", OSError, ValueError):
        records = [json.loads(line) for line in path.read_text().splitlines() if line]
    with boundary(ConfigError, f"{str(path)!r} holds other rollouts than ours", KeyError, IndexError, TypeError):
        return [rollout_of(record) for record in records]


def rollout_of(record: Mapping[str, Any]) -> Rollout:
    """A line of the cookbook's record of rollouts. Raises KeyError for one that isn't of an episode of ours."""
    steps = record["steps"]
    last = {**steps[-1]["metrics"], **record["trajectory_metrics"]}  # the latter where it was scored outside of a step
    stops = [name.removeprefix("stop/") for name in last if name.startswith("stop/")]
    return Rollout(
        task=steps[-1]["logs"]["task"],
        reward=record["total_reward"],
        scores={name.removeprefix("score/"): last[name] for name in last if name.startswith("score/")},
        flags={
            "cut": bool(last["cut"]),
            "parse_error": any(step["metrics"].get("parse_error") for step in steps),
            "tool_error": last["tool_errors"] > 0,
        },
        amounts={
            "messages": last["messages"],
            "prompt_tokens": sum(step["ob_len"] for step in steps),
            "sampled_tokens": sum(step["ac_len"] for step in steps),
            "tool_calls": last["tool_calls"],
        },
        stop_reason=stops[0] if stops else UNKNOWN_STOP,
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
