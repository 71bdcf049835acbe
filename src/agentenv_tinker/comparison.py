"""Compares two evaluations task by task: what differs on average, how sure that is, and which tasks changed.

The test is the paired t test over tasks: the tasks are the sample, and how hard each is falls out of its difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence, Set
from dataclasses import dataclass

from agentenv_tinker.errors import ConfigError
from agentenv_tinker.evaluation import TOLERANCE, Evaluation, TaskResult

LEVEL = 0.95
_NAMED = 3  # how many tasks an error names


@dataclass(frozen=True, kw_only=True)
class Change:
    """A task's mean reward in the two evaluations."""

    task: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        return self.second - self.first


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How a second evaluation differs from a first one, over the tasks that failed in neither."""

    tasks: int
    """How many are compared."""
    left_out: tuple[str, ...]
    """Those with an episode that failed in either evaluation."""
    first: float
    second: float
    """The mean over the compared tasks."""
    difference: float
    """The second mean less the first."""
    interval: tuple[float, float] | None
    """The difference's interval of confidence 0.95; None for a single task."""
    p_value: float | None
    """The chance of a difference this large or larger where there is none; None where all tasks changed alike."""
    changes: tuple[Change, ...]
    """The tasks that changed, the most changed first."""

    @property
    def better(self) -> int:
        return sum(change.difference > 0 for change in self.changes)

    @property
    def worse(self) -> int:
        return len(self.changes) - self.better

    @property
    def same(self) -> int:
        return self.tasks - len(self.changes)


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """How `second` differs from `first`. Raises ConfigError where they are of different tasks, or no task is left."""
    before, after = ({result.task: result for result in each.tasks} for each in (first, second))
    _check_same(before.keys(), after.keys())
    left_out = tuple(task for task in before if before[task].failed or after[task].failed)
    pairs = [
        Change(task=task, first=_mean(before[task]), second=_mean(after[task]))
        for task in before
        if task not in left_out
    ]
    if not pairs:
        raise ConfigError("no task can be compared: each has an episode that failed in one of the evaluations")
    differences = [pair.difference for pair in pairs]
    interval, p_value = paired_t(differences)
    changed = [pair for pair in pairs if abs(pair.difference) > TOLERANCE]
    return Comparison(
        tasks=len(pairs),
        left_out=left_out,
        first=statistics.fmean(pair.first for pair in pairs),
        second=statistics.fmean(pair.second for pair in pairs),
        difference=statistics.fmean(differences),
        interval=interval,
        p_value=p_value,
        changes=tuple(sorted(changed, key=lambda pair: -abs(pair.difference))),
    )


def _mean(result: TaskResult) -> float:
    assert result.mean is not None  # a task of which nothing was scored is left out
    return result.mean


def _check_same(first: Set[str], second: Set[str]) -> None:
    sides = [
        f"{_named(only)} only in the {side}"
        for side, only in (("first", sorted(first - second)), ("second", sorted(second - first)))
        if only
    ]
    if sides:
        raise ConfigError(
            f"the evaluations are of different tasks: {len(first & second)} are in both, {' and '.join(sides)};"
            " play the same split, and as many of its tasks"
        )


def _named(tasks: Sequence[str]) -> str:
    return f"{len(tasks)} ({', '.join(tasks[:_NAMED])}{', ...' if len(tasks) > _NAMED else ''})"


def paired_t(differences: Sequence[float]) -> tuple[tuple[float, float] | None, float | None]:
    """The confidence interval of the mean of `differences`, and the p-value of it being 0, by Student's t."""
    count = len(differences)
    if count < 2:
        return None, None
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(count)
    if error < TOLERANCE:
        return (mean, mean), None
    reach = t_quantile(LEVEL, count - 1) * error
    return (mean - reach, mean + reach), max(1 - t_within(abs(mean) / error, count - 1), 0.0)


def t_quantile(level: float, degrees: int) -> float:
    """The t that a value of Student's distribution stays within, either side of 0, with probability `level`."""
    low, high = 0.0, 1.0
    while t_within(high, degrees) < level:
        high *= 2
    for _ in range(60):  # halves the bracket each time, to the last bit of a float
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, degrees) < level else (low, middle)
    return high


def t_within(t: float, degrees: int) -> float:
    """The probability that a value of Student's distribution is between -t and t, t >= 0.

    The finite series for whole degrees of freedom, Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3
    and 26.7.4.
    """
    angle = math.atan2(t, math.sqrt(degrees))
    cosine = math.cos(angle)
    odd = degrees % 2
    term, total = cosine if odd else 1.0, 0.0
    for n in range(2 + odd, degrees + 1, 2):
        total += term
        term *= (n - 1) / n * cosine**2
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total
