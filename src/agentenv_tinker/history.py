"""Reads what a training run left in its folder so far: steps, rollouts, evaluations, settings."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv_tinker.errors import ConfigError, boundary
from agentenv_tinker.evaluation import Evaluation, Rollout, read_rollouts
from agentenv_tinker.phases import phase_seconds

SUMMARY_FILE = "summary.json"
WARM_START_FILE = "warm_start.jsonl"

_KEPT = 4096  # steps whose rollouts are kept in memory from one reading to the next


@dataclass(frozen=True)
class Step:
    """A training step, as far as it was recorded."""

    number: int
    """From 0."""
    metrics: Mapping[str, Any]
    """The cookbook's, with the evaluation's before it as `test/...`."""
    rollouts: tuple[Rollout, ...]
    """Those that were trained on; none, in a step whose every group failed."""
    groups: tuple[tuple[float, ...], ...]
    """Their rewards, by group."""
    tokens: Mapping[str, int]
    """How many were `read` to sample, `sampled`, and `trained` on or read to: each rollout's whole conversation."""
    failed_share: float
    """The share of the planned rollouts that failed, and their groups with them: none of them was trained on."""
    phases: Mapping[str, float]
    """Seconds by phase; see `phases.PHASES`. Empty where the cookbook recorded no spans."""


@dataclass(frozen=True)
class History:
    """A training run so far."""

    folder: Path
    settings: Mapping[str, Any]
    """As the run was started with them."""
    versions: Mapping[str, str]
    """Of the packages that it was started with, where they were recorded."""
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    """In the order they were made; the base model's first."""
    warm_start: tuple[Mapping[str, Any], ...]
    """The metrics of its supervised steps, where it warm-started."""
    finished: bool

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.name


def read_history(folder: Path) -> History:
    """What the training run in `folder` left so far. Blocks. Raises ConfigError for a folder that isn't a run's."""
    folder = folder.resolve()
    with boundary(ConfigError, f"{str(folder)!r} is not the folder of a training run", OSError, ValueError):
        settings = json.loads((folder / "run.json").read_text())
    if not isinstance(settings, dict) or "steps" not in settings:
        raise ConfigError(f"{str(folder)!r} is the folder of another command than train")
    return History(
        folder=folder,
        versions=settings.pop("versions", {}),
        settings=settings,
        steps=tuple(_steps(folder, settings["groups_per_batch"] * settings["group_size"])),
        evaluations=tuple(_evaluations(folder)),
        warm_start=tuple(_lines(folder / WARM_START_FILE)),
        finished=(folder / SUMMARY_FILE).exists(),
    )


def _steps(folder: Path, planned: int) -> Iterator[Step]:
    spans = {each["step"]: each["spans"] for each in _lines(folder / "timing_spans.jsonl")}
    for metrics in _lines(folder / "metrics.jsonl"):
        if "progress/batch" not in metrics:  # the evaluation after the last step
            continue
        number = metrics["progress/batch"]
        records = folder / f"iteration_{number:06d}" / "train_rollout_summaries.jsonl"
        rollouts, groups, tokens = _recorded(records, records.stat().st_mtime_ns if records.exists() else None)
        timed = spans.get(number)
        phases = phase_seconds(timed, metrics["time/total"]) if timed and "time/total" in metrics else {}
        failed = max(1 - len(rollouts) / planned, 0.0)
        yield Step(number, metrics, rollouts, groups, tokens, failed, phases)


@functools.lru_cache(maxsize=_KEPT)
def _recorded(
    path: Path, changed: int | None
) -> tuple[tuple[Rollout, ...], tuple[tuple[float, ...], ...], Mapping[str, int]]:
    """The rollouts of a step, their rewards by group, and their tokens; of a file that `changed` at that time."""
    if changed is None:
        return (), (), {"read": 0, "sampled": 0, "trained": 0}
    groups: dict[int, list[float]] = {}
    trained = 0
    for record in _lines(path):
        groups.setdefault(record["group_idx"], []).append(record["total_reward"])
        trained += record["steps"][-1]["ob_len"] + record["steps"][-1]["ac_len"]
    rollouts = tuple(read_rollouts(path))
    tokens = {
        "read": int(sum(each.amounts["prompt_tokens"] for each in rollouts)),
        "sampled": int(sum(each.amounts["sampled_tokens"] for each in rollouts)),
        "trained": trained,
    }
    return rollouts, tuple(map(tuple, groups.values())), tokens


def _evaluations(folder: Path) -> Iterator[Evaluation]:
    """The base model's, then those by step."""
    found = [Evaluation.read(path) for path in (folder / "evaluations").glob("*.json")]
    yield from sorted(found, key=lambda each: (each.label != "base", each.step or 0))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; none where it isn't there, and not the last where a kill cut it short."""
    if path.exists():
        for line in path.read_text().split("\n")[:-1]:
            if line:
                yield json.loads(line)
