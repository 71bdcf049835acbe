"""Writes a training run's page, `report.html`: whether it learned, what it did, and whether to trust that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from agentenv_tinker.comparison import Comparison, compare
from agentenv_tinker.errors import AgentEnvTinkerError
from agentenv_tinker.evaluation import Evaluation
from agentenv_tinker.history import History, Step, read_history
from agentenv_tinker.phases import PHASES
from agentenv_tinker.plots import plots
from agentenv_tinker.transcripts import pairs

FILE_NAME = "report.html"

_LOOK_SECONDS = 1.0
_LEAST_IDLE = 20  # a page that took a second to write is not written again within 20: it is to cost a run little
_PAGES = jinja2.Environment(
    loader=jinja2.PackageLoader("agentenv_tinker"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
logger = logging.getLogger(__name__)


def write_report(folder: Path) -> Path:
    """Write the page of the training run in `folder`, from what it left so far, and return its path. Blocks.

    The page needs no other file and no network. Raises ConfigError for a folder that isn't a training run's.
    """
    history = read_history(folder)
    page = _PAGES.get_template(FILE_NAME).render(_shown(history))
    unfinished = history.folder / f"{FILE_NAME}.unfinished"
    unfinished.write_text(page)
    return unfinished.replace(history.folder / FILE_NAME)


@contextlib.asynccontextmanager
async def reported(folder: Path, *, before: Callable[[], object]) -> AsyncIterator[None]:
    """Keep the page of the run in `folder` as new as its metrics, for the block. `before` is called before each time,
    off the event loop. A page that can't be written is logged, and stops nothing."""
    writing = asyncio.create_task(_keep_written(folder, before))
    try:
        yield
    finally:
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing


async def _keep_written(folder: Path, before: Callable[[], object]) -> None:
    metrics, known = folder / "metrics.jsonl", 0
    loop = asyncio.get_running_loop()
    while True:
        size = await asyncio.to_thread(_size, metrics)
        if size != known:
            known, began = size, loop.time()
            await asyncio.to_thread(try_to_report, folder, before)
            await asyncio.sleep(_LEAST_IDLE * (loop.time() - began))
        await asyncio.sleep(_LOOK_SECONDS)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def try_to_report(folder: Path, before: Callable[[], object] = lambda: None) -> None:
    """Write the page of the run in `folder`, or log why that can't be: no page is worth a run. Blocks."""
    try:
        before()
        write_report(folder)
    except (AgentEnvTinkerError, OSError, ValueError, KeyError, TypeError):
        logger.exception("the report of %s could not be written", folder)


@dataclass(frozen=True)
class _TaskRow:
    """A task's mean rewards, in each evaluation or in each step that trained on it."""

    task: str
    rewards: Sequence[float | None]


def _shown(history: History) -> Mapping[str, Any]:
    """What the page's template is given."""
    return {
        "history": history,
        "settings": {name: value for name, value in sorted(history.settings.items()) if value not in ("", [], None)},
        "state": _state(history),
        "gain": _gain(history.evaluations),
        "thresholds": sorted({each for evaluation in history.evaluations for each in evaluation.above}),
        "plots": list(plots(history)),
        "phases": _phase_shares(history.steps),
        "tokens": _tokens(history),
        "cost": _cost(history),
        "held_out": list(_held_out_rows(history.evaluations)),
        "trained": list(_trained_rows(history.steps)),
        "reward_range": _reward_range(history),
        "failures": list(_failures(history.evaluations)),
        "pairs": pairs(history),
    }


def _state(history: History) -> str:
    made, planned = len(history.steps), history.settings["steps"]
    if history.finished:
        return f"finished, {planned} steps"
    return f"{made} of {planned} steps"


def _gain(evaluations: Sequence[Evaluation]) -> Comparison | None:
    """What RL changed: the last evaluation against the one before the first step, on the same tasks."""
    before = next((each for each in evaluations if each.label == "step-0"), None)
    last = evaluations[-1] if evaluations else None
    if before is None or last is None or last.label in ("base", "step-0"):
        return None
    with contextlib.suppress(AgentEnvTinkerError):  # no task was scored in both
        return compare(before, last)
    return None


def _phase_shares(steps: Sequence[Step]) -> dict[str, float]:
    """The share of each phase in the time of all steps, and the seconds of that, less evaluations."""
    seconds = {phase: sum(step.phases.get(phase, 0.0) for step in steps) for phase in PHASES if phase != "evaluation"}
    total = sum(seconds.values())
    return {phase: each / total for phase, each in seconds.items()} if total else {}


def _tokens(history: History) -> dict[str, int]:
    """The tokens of all steps and evaluations: read, sampled, trained."""
    counted = Counter(read=0, sampled=0, trained=0)
    for step in history.steps:
        counted.update(step.tokens)
    for evaluation in history.evaluations:
        counted["read"] += round(evaluation.per_episode.get("prompt_tokens", 0) * evaluation.episodes)
        counted["sampled"] += round(evaluation.per_episode.get("sampled_tokens", 0) * evaluation.episodes)
    return dict(counted)


def _cost(history: History) -> float | None:
    """Dollars, by the prices that the run was given; None without any."""
    prices = history.settings.get("token_prices") or []
    if len(prices) != 3:
        return None
    tokens = _tokens(history)
    read, sampled, trained = map(float, prices)
    return (tokens["read"] * read + tokens["sampled"] * sampled + tokens["trained"] * trained) / 1e6


def _held_out_rows(evaluations: Sequence[Evaluation]) -> Iterator[_TaskRow]:
    """Each held-out task, those with the least last reward first."""
    means = [{task.task: task.mean for task in evaluation.tasks} for evaluation in evaluations]
    tasks = dict.fromkeys(task for each in means for task in each)
    rows = [_TaskRow(task, [each.get(task) for each in means]) for task in tasks]
    yield from sorted(rows, key=lambda row: row.rewards[-1] if row.rewards[-1] is not None else -1e9)


def _trained_rows(steps: Sequence[Step]) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Each task that was trained on, with the mean reward of each step that it was in."""
    rewards: dict[str, dict[int, list[float]]] = {}
    for step in steps:
        for rollout in step.rollouts:
            rewards.setdefault(rollout.task, {}).setdefault(step.number, []).append(rollout.reward)
    for task, by_step in sorted(rewards.items()):
        yield task, [(number + 1, sum(each) / len(each)) for number, each in by_step.items()]


def _reward_range(history: History) -> tuple[float, float]:
    """The least and the greatest reward of any rollout, for the colour of a cell."""
    rewards = [reward for step in history.steps for group in step.groups for reward in group]
    rewards += [reward for each in history.evaluations for task in each.tasks for reward in task.rewards]
    return (min(rewards), max(rewards)) if rewards else (0.0, 1.0)


def _failures(evaluations: Sequence[Evaluation]) -> Iterator[tuple[str, str, str]]:
    for evaluation in evaluations:
        for task in evaluation.tasks:
            if task.failed:
                yield evaluation.label, task.task, "; ".join(task.errors) or "see logs.log"
