"""Evaluations and comparisons of them as plain text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from agentenv_tinker.comparison import LEVEL, Comparison
from agentenv_tinker.evaluation import Evaluation, TaskResult

_K = TypeVar("_K", bound=float)

_WIDTH = 100
_CHANGED = 10  # how many of the tasks that changed are listed


def evaluation_table(evaluation: Evaluation) -> str:
    """What an evaluation came to: the reward of each task, the measures, and each failure."""
    rows = [("model", _model(evaluation)), ("played", _played(evaluation)), *_measures(evaluation)]
    return "\n".join([*_columns(evaluation.tasks), "", *_aligned(rows), *_failures(evaluation)])


def _model(evaluation: Evaluation) -> str:
    kept = "the base model" if not evaluation.step else f"after step {evaluation.step}, not kept"
    return f"{evaluation.model}, {evaluation.checkpoint or kept}"


def _played(evaluation: Evaluation) -> str:
    often = "once" if evaluation.samples == 1 else f"{evaluation.samples} times"
    return f"{len(evaluation.tasks)} tasks of {evaluation.split} {often}, at temperature {evaluation.temperature:g}"


def _measures(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    yield "reward", evaluation.line
    for k, chance in evaluation.pass_at.items():
        yield f"pass@{k}", f"{_percent(chance)} (a reward of {evaluation.pass_threshold:g} or more)"
    for threshold, share in evaluation.above.items():
        yield f"above {threshold:g}", _percent(share)
    for step, score in evaluation.scores.items():
        yield f"score {step}", f"{score:.3f}"
    yield "episodes with", _listed({_plain(name): _percent(rate) for name, rate in evaluation.rates.items()})
    yield "ended by", _listed({reason: str(count) for reason, count in evaluation.stop_reasons.items()})
    yield "per episode", _listed({_plain(name): f"{amount:.1f}" for name, amount in evaluation.per_episode.items()})


def _columns(tasks: Sequence[TaskResult]) -> Iterator[str]:
    """Each task with its mean reward, as many side by side as fit."""
    cells = [f"{task.task} {'failed' if task.mean is None else f'{task.mean:.2f}'}" for task in tasks]
    width = max(map(len, cells), default=0) + 2
    in_line = max(_WIDTH // width, 1)
    for start in range(0, len(cells), in_line):
        yield "".join(cell.ljust(width) for cell in cells[start : start + in_line]).rstrip()


def _failures(evaluation: Evaluation) -> Iterator[str]:
    if evaluation.failed:
        yield ""
        yield f"failed, and part of no number above: {evaluation.failed}"
    for task in evaluation.tasks:
        if task.failed:
            yield f"  {task.task}: {'; '.join(task.errors) or 'see the log'}"


def comparison_table(first: Evaluation, second: Evaluation, comparison: Comparison) -> str:
    """How `second` differs from `first`."""
    rows = [("first", _model(first)), ("second", _model(second)), *_differences(first, second, comparison)]
    return "\n".join([*_aligned(rows), *_changes(comparison)])


def _differences(first: Evaluation, second: Evaluation, comparison: Comparison) -> Iterator[tuple[str, str]]:
    yield "compared", _counted(comparison)
    yield "reward", f"{comparison.first:.3f} -> {comparison.second:.3f}"
    yield "difference", _difference(comparison)
    yield "tasks", f"{comparison.better} better, {comparison.worse} worse, {comparison.same} the same"
    yield from _shares("pass@", first.pass_at, second.pass_at)
    yield from _shares("above ", first.above, second.above)


def _shares(name: str, first: Mapping[_K, float], second: Mapping[_K, float]) -> Iterator[tuple[str, str]]:
    for key in first:
        if key in second:
            yield f"{name}{key:g}", f"{_percent(first[key])} -> {_percent(second[key])}"


def _counted(comparison: Comparison) -> str:
    left_out = f"; left out, as an episode failed: {', '.join(comparison.left_out)}" if comparison.left_out else ""
    return f"{comparison.tasks} tasks{left_out}"


def _difference(comparison: Comparison) -> str:
    parts = [f"{comparison.difference:+.3f}"]
    if comparison.interval is not None:
        low, high = comparison.interval
        parts.append(f"{LEVEL:.0%} interval {low:+.3f} to {high:+.3f}")
    if comparison.p_value is not None:
        parts.append("p < 0.001" if comparison.p_value < 0.001 else f"p = {comparison.p_value:.3f}")
    return ", ".join(parts)


def _changes(comparison: Comparison) -> Iterator[str]:
    shown = comparison.changes[:_CHANGED]
    if shown:
        yield ""
        yield f"most changed{f', of {len(comparison.changes)}' if len(comparison.changes) > len(shown) else ''}:"
    width = max((len(change.task) for change in shown), default=0)
    for change in shown:
        yield f"  {change.task.ljust(width)}  {change.first:.2f} -> {change.second:.2f}  {change.difference:+.2f}"


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows) + 2
    return [f"{name.ljust(width)}{value}" for name, value in rows]


def _listed(amounts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {amount}" for name, amount in amounts.items())


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
