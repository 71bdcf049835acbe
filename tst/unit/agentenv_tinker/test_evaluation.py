"""What an evaluation came to."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv_tinker.errors import ConfigError, EpisodeFailedError
from agentenv_tinker.evaluation import Evaluation, Failure, Plan, evaluation_of, read_rollouts


def plan(**more: Any) -> Plan:
    """An evaluation of the tasks a and b."""
    known = {"label": "e", "step": 4, "model": "m", "checkpoint": None, "split": "held", "tasks": ("a", "b")}
    return Plan(**{**known, **more})


def record(task: str, reward: float, **metrics: float) -> dict[str, Any]:
    """A line of the cookbook's record of rollouts: a message of 5 tokens on a prompt of 20, and one of 3 on one of 30."""
    last = {"messages": 2, "tool_calls": 1, "tool_errors": 0, "cut": 0.0, "score/s": reward, **metrics}
    first = {"ob_len": 20, "ac_len": 5, "metrics": {}, "logs": {}}
    return {
        "total_reward": reward,
        "trajectory_metrics": {},
        "steps": [first, {"ob_len": 30, "ac_len": 3, "metrics": last, "logs": {"task": task}}],
    }


def written(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "eval_test_rollout_summaries.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_an_evaluation_of_failures_alone_is_an_error() -> None:
    """No reward at all is not a reward of 0, and the first reason is told."""
    with pytest.raises(EpisodeFailedError, match="not one of 2 episodes of evaluation 'e' was scored; the first: broke"):
        evaluation_of(plan(), [], [Failure("a", "broke"), Failure("b", "died")])
