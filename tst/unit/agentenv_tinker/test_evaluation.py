"""What an evaluation came to: worked out by hand, and from the cookbook's records."""

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv_tinker.errors import ConfigError, EpisodeFailedError
from agentenv_tinker.evaluation import (
    Evaluation,
    Failure,
    Plan,
    Rollout,
    TaskResult,
    clustered_error,
    evaluation_of,
    pass_at_k,
    read_rollouts,
)


def plan(*tasks: str, **more: Any) -> Plan:
    """An evaluation of `tasks` after 4 steps."""
    known = {"label": "e", "step": 4, "model": "m", "checkpoint": "tinker://c", "split": "held"}
    return Plan(tasks=tasks, **{**known, **more})


def rollout(task: str, reward: float, *, cut: bool = False, calls: int = 1, stop: str = "completed") -> Rollout:
    return Rollout(
        task=task,
        reward=reward,
        scores={"s": reward},
        flags={"cut": cut, "parse_error": False, "tool_error": calls > 1},
        amounts={"messages": 2, "prompt_tokens": 50, "sampled_tokens": 8, "tool_calls": calls},
        stop_reason=stop,
    )


def test_every_number_is_of_the_episodes_that_were_scored() -> None:
    """Three tasks of two samples: one passes twice, one once with nothing else, and one fails and earns a half."""
    rollouts = [
        rollout("a", 1.0),
        rollout("a", 1.0, calls=3),
        rollout("b", 0.0, cut=True, stop="max_tokens"),
        rollout("b", 1.0),
        rollout("c", 0.5),
    ]

    evaluation = evaluation_of(
        plan("a", "b", "c", samples=2, thresholds=(0.5, 0.2)), rollouts, [Failure("c", "its sandbox died")]
    )

    assert evaluation == Evaluation(
        label="e",
        step=4,
        model="m",
        checkpoint="tinker://c",
        split="held",
        samples=2,
        temperature=1.0,
        episodes=5,
        failed=1,
        mean=pytest.approx(0.7),
        standard_error=pytest.approx(math.sqrt(3 / 2 * (0.6**2 + 0.4**2 + 0.2**2)) / 5),
        pass_threshold=1.0,
        pass_at={1: pytest.approx((1 + 1 / 2 + 0) / 3), 2: 1.0},
        above={0.2: 0.8, 0.5: 0.6},
        scores={"s": pytest.approx(0.7)},
        rates={"cut": 0.2, "parse_error": 0.0, "tool_error": 0.2},
        stop_reasons={"completed": 4, "max_tokens": 1},
        per_episode={"messages": 2.0, "prompt_tokens": 50.0, "sampled_tokens": 8.0, "tool_calls": 1.4},
        tasks=(
            TaskResult(task="a", rewards=(1.0, 1.0), failed=0),
            TaskResult(task="b", rewards=(0.0, 1.0), failed=0),
            TaskResult(task="c", rewards=(0.5,), failed=1, errors=("its sandbox died",)),
        ),
    )
    assert evaluation.line == "0.700 +/- 0.183 (s.e.) over 5 episodes, 1 failed"


def test_a_task_that_failed_each_time_is_there_without_a_mean() -> None:
    """It has no reward, and no part in any number."""
    evaluation = evaluation_of(plan("a", "b"), [rollout("b", 0.25)])

    assert evaluation.tasks[0] == TaskResult(task="a", rewards=(), failed=1)
    assert evaluation.tasks[0].mean is None
    assert (evaluation.mean, evaluation.pass_at, evaluation.failed) == (0.25, {1: 0.0}, 1)


def test_a_single_task_has_no_standard_error() -> None:
    """One task says nothing of how tasks differ."""
    assert evaluation_of(plan("a"), [rollout("a", 1.0)]).line == "1.000 over 1 episode"


def test_the_pass_threshold_is_reached_and_the_others_are_passed() -> None:
    """A reward at the threshold passes, and is not above it, though the sum that made it is a bit off."""
    tenths = sum([0.1] * 10)  # 0.9999999999999999

    evaluation = evaluation_of(plan("a", "b", thresholds=(1.0, tenths)), [rollout("a", tenths), rollout("b", 1.0)])

    assert (evaluation.pass_at, evaluation.above) == ({1: 1.0}, {tenths: 0.0, 1.0: 0.0})


def test_an_evaluation_of_failures_alone_is_an_error() -> None:
    """No reward at all is not a reward of 0, and the first reason is told."""
    with pytest.raises(
        EpisodeFailedError, match="not one of 2 episodes of evaluation 'e' was scored; the first: broke"
    ):
        evaluation_of(plan("a", "b"), [], [Failure("a", "broke"), Failure("b", "died")])


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_the_choices_of_k_episodes_that_hold_one_that_passed(
    passed: list[bool], data: st.DataObject
) -> None:
    """The closed form is what counting every choice comes to."""
    k = data.draw(st.integers(1, len(passed)))

    choices = [any(choice) for choice in itertools.combinations(passed, k)]

    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(choices) / len(choices))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20), st.integers(1, 4))
def test_playing_a_task_again_with_the_same_result_makes_the_mean_no_surer(rewards: list[float], samples: int) -> None:
    """Where the episodes of a task are copies, the error is that of one episode a task."""
    alone = statistics.stdev(rewards) / math.sqrt(len(rewards))

    assert clustered_error([[reward] * samples for reward in rewards]) == pytest.approx(alone, abs=1e-9)


def record(task: str, reward: float, **metrics: float) -> dict[str, Any]:
    """A line of the cookbook's records: a message of 5 tokens on a prompt of 20, and one of 3 on one of 30."""
    last = {"messages": 2, "tool_calls": 1, "tool_errors": 0, "cut": 0.0, "score/s": reward, **metrics}
    return {
        "total_reward": reward,
        "trajectory_metrics": {},
        "steps": [
            {"ob_len": 20, "ac_len": 5, "metrics": {}, "logs": {}},
            {"ob_len": 30, "ac_len": 3, "metrics": last, "logs": {"task": task}},
        ],
    }


def written(folder: Path, *records: Any) -> Path:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_rollouts_are_read_from_the_cookbooks_records(tmp_path: Path) -> None:
    """The counts of the last step, the tokens of all, and what was scored after them."""
    parsed = record("a", 0.5, **{"stop/max_turns": 1.0})
    parsed["steps"][0]["metrics"]["parse_error"] = 1.0
    late = record("b", 0.25, tool_errors=2)
    late["trajectory_metrics"] = {"score/t": 0.75, "cut": 1.0}

    assert read_rollouts(written(tmp_path, parsed, late)) == [
        Rollout(
            task="a",
            reward=0.5,
            scores={"s": 0.5},
            flags={"cut": False, "parse_error": True, "tool_error": False},
            amounts={"messages": 2, "prompt_tokens": 50, "sampled_tokens": 8, "tool_calls": 1},
            stop_reason="max_turns",
        ),
        Rollout(
            task="b",
            reward=0.25,
            scores={"s": 0.25, "t": 0.75},
            flags={"cut": True, "parse_error": False, "tool_error": True},
            amounts={"messages": 2, "prompt_tokens": 50, "sampled_tokens": 8, "tool_calls": 1},
            stop_reason="unknown",
        ),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "can't be read as rollouts: "),
        ('{"steps": []}', "holds other rollouts than ours: "),
        ("[]", "holds other rollouts than ours: "),
        (
            '{"steps": [{"metrics": {}, "logs": {}}], "trajectory_metrics": {}}',
            "holds other rollouts than ours: 'task'",
        ),
    ],
    ids=["no JSON", "no step", "a list", "no task"],
)
def test_records_that_are_not_ours_are_refused(tmp_path: Path, line: str, message: str) -> None:
    """The error names the file and what it lacks."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text(line + "\n")

    with pytest.raises(ConfigError, match=f"rollouts.jsonl' {message}"):
        read_rollouts(path)


def test_an_evaluation_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """Numbers that are keys, tasks and reasons come back as they were."""
    evaluation = evaluation_of(
        plan("a", "b", samples=2, step=None, checkpoint=None, thresholds=(0.2,)),
        [rollout("a", 0.3)],
        [Failure("b", "broke")],
    )

    evaluation.write(tmp_path / "evaluations" / "e.json")

    assert Evaluation.read(tmp_path / "evaluations" / "e.json") == evaluation
    assert [path.name for path in (tmp_path / "evaluations").iterdir()] == ["e.json"]


def test_a_written_evaluation_has_these_keys() -> None:
    """What others read it by."""
    known = evaluation_of(plan("a", thresholds=(0.2,)), [rollout("a", 1.0)]).to_dict()

    assert known == {
        "label": "e",
        "step": 4,
        "model": "m",
        "checkpoint": "tinker://c",
        "split": "held",
        "samples": 1,
        "temperature": 1.0,
        "episodes": 1,
        "failed": 0,
        "mean": 1.0,
        "standard_error": None,
        "pass_threshold": 1.0,
        "pass_at": {"1": 1.0},
        "above": {"0.2": 1.0},
        "scores": {"s": 1.0},
        "rates": {"cut": 0.0, "parse_error": 0.0, "tool_error": 0.0},
        "stop_reasons": {"completed": 1},
        "per_episode": {"messages": 2.0, "prompt_tokens": 50.0, "sampled_tokens": 8.0, "tool_calls": 1.0},
        "tasks": [{"task": "a", "rewards": [1.0], "failed": 0, "errors": []}],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't be read as an evaluation: .*No such file"),
        ("no", "can't be read as an evaluation: Expecting value"),
        ("[]", "holds no evaluation: "),
        ("{}", "holds no evaluation: it has no 'label'"),
    ],
    ids=["no file", "no JSON", "a list", "another object"],
)
def test_a_file_that_holds_no_evaluation_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    """The error names the file and why."""
    path = tmp_path / "e.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=f"e.json' {message}"):
        Evaluation.read(path)
