"""What an evaluation came to."""

import json
from pathlib import Path

import pytest

from agentenv_tinker.errors import EpisodeFailedError
from agentenv_tinker.evaluation import read_evaluation, summarize


def write_rollouts(folder: Path, step: int, rewards: list[float]) -> None:
    """The records that the cookbook leaves of an evaluation."""
    iteration = folder / f"iteration_{step:06d}"
    iteration.mkdir()
    lines = [json.dumps({"total_reward": reward, "steps": []}) for reward in rewards]
    (iteration / "eval_0_rollout_summaries.jsonl").write_text("\n".join(lines) + "\n")


def test_an_evaluation_is_read_from_the_recorded_rollouts(tmp_path: Path) -> None:
    """The mean, its standard error and the episodes that failed come from what was recorded, at that step alone."""
    write_rollouts(tmp_path, 0, [9.0])
    write_rollouts(tmp_path, 4, [0.0, 0.5, 1.0])

    evaluation = read_evaluation(tmp_path, 4, planned=5)

    assert evaluation.line == "0.500 +/- 0.289 (s.e.) over 3 episodes, 2 failed"


def test_failed_episodes_are_never_averaged_in(tmp_path: Path) -> None:
    """Two of four episodes failed, and the mean is that of the other two."""
    assert summarize(0, [0.25, 0.75], planned=4).mean == 0.5


def test_a_single_episode_has_no_standard_error() -> None:
    """One reward says nothing of its spread."""
    assert summarize(0, [1.0], planned=1).line == "1.000 +/- nan (s.e.) over 1 episodes"


def test_an_evaluation_of_failures_alone_is_an_error(tmp_path: Path) -> None:
    """No reward at all is not a reward of 0."""
    with pytest.raises(EpisodeFailedError, match="all 3 episodes of the evaluation at step 0 failed"):
        read_evaluation(tmp_path, 0, planned=3)
