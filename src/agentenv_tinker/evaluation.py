"""Reads the evaluations of a run from the rollouts that the cookbook recorded, and says what they came to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv_tinker.errors import EpisodeFailedError


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation came to. An episode that failed has no reward, and counts in `failed` alone."""

    step: int
    """The training steps behind the model."""
    mean: float
    standard_error: float
    """Of the mean, by the sample's standard deviation; NaN for a single episode."""
    episodes: int
    failed: int

    @property
    def line(self) -> str:
        """The evaluation in one line."""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.mean:.3f} +/- {self.standard_error:.3f} (s.e.) over {self.episodes} episodes{failed}"


def read_evaluation(folder: Path, step: int, *, planned: int) -> Evaluation:
    """The evaluation recorded at `step` under the run's `folder`, of which `planned` episodes were to be played.

    Raises EpisodeFailedError where none of them was.
    """
    rewards = [
        float(json.loads(line)["total_reward"])
        for path in sorted(_iteration(folder, step).glob("eval_*_rollout_summaries.jsonl"))
        for line in path.read_text().splitlines()
        if line
    ]
    if not rewards:
        raise EpisodeFailedError(f"all {planned} episodes of the evaluation at step {step} failed; see the log")
    return summarize(step, rewards, planned=planned)


def summarize(step: int, rewards: Sequence[float], *, planned: int) -> Evaluation:
    """The evaluation of `rewards`, one an episode, at least one."""
    spread = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else math.nan
    return Evaluation(step, statistics.fmean(rewards), spread, len(rewards), planned - len(rewards))


def _iteration(folder: Path, step: int) -> Path:
    return folder / f"iteration_{step:06d}"
