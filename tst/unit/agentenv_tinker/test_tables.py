"""Evaluations and comparisons as a person reads them."""

import dataclasses

from agentenv_tinker.comparison import compare
from agentenv_tinker.evaluation import Evaluation, Failure, Plan, Rollout, evaluation_of
from agentenv_tinker.tables import comparison_table, evaluation_table


def evaluation(rewards: dict[str, list[float]], *failures: Failure, **more: str | None) -> Evaluation:
    """Two samples of each task, each of one message; those below 0.2 are cut."""
    plan = Plan(
        label="e", step=0, model="m", checkpoint=None, split="held", tasks=tuple(rewards), samples=2, thresholds=(0.2,)
    )
    rollouts = [
        Rollout(
            task=task,
            reward=reward,
            scores={"profit": reward},
            flags={"cut": reward < 0.2, "tool_error": False},
            amounts={"messages": 1, "sampled_tokens": 12},
            stop_reason="max_tokens" if reward < 0.2 else "completed",
        )
        for task, each in rewards.items()
        for reward in each
    ]
    return evaluation_of(dataclasses.replace(plan, **more), rollouts, failures)


FIRST = evaluation({"day-1": [0.0, 0.5], "day-2": [1.0, 1.0], "day-10": [0.5]}, Failure("day-10", "its sandbox died"))


def test_an_evaluation_is_the_tasks_a_row_a_measure_and_the_failures() -> None:
    """What failed is below the numbers, with its reason."""
    assert evaluation_table(FIRST) == "\n".join(
        [
            "day-1 0.25   day-2 1.00   day-10 0.50",
            "",
            "model          m, the base model",
            "played         3 tasks of held 2 times, at temperature 1",
            "reward         0.600 +/- 0.262 (s.e.) over 5 episodes, 1 failed",
            "pass@1         33.3 % (a reward of 1 or more)",
            "pass@2         50.0 % (a reward of 1 or more)",
            "above 0.2      80.0 %",
            "score profit   0.600",
            "episodes with  cut 20.0 %, tool error 0.0 %",
            "ended by       completed 4, max_tokens 1",
            "per episode    messages 1.0, sampled tokens 12.0",
            "",
            "failed, and part of no number above: 1",
            "  day-10: its sandbox died",
        ]
    )


def test_tasks_stand_side_by_side_as_many_as_fit() -> None:
    """Five of 18 characters to a line of 100, in the order of the plan."""
    table = evaluation_table(evaluation({f"held_out-{i:03}": [i / 10, i / 10] for i in range(6)}))

    assert table.splitlines()[:3] == [
        "held_out-000 0.00  held_out-001 0.10  held_out-002 0.20  held_out-003 0.30  held_out-004 0.40",
        "held_out-005 0.50",
        "",
    ]


def test_a_comparison_tells_the_difference_and_the_tasks_that_changed() -> None:
    """With its interval, and what was left out."""
    second = evaluation({"day-1": [1.0, 1.0], "day-2": [0.9, 1.0], "day-10": [0.5, 0.5]}, checkpoint="tinker://c")

    assert comparison_table(FIRST, second, compare(FIRST, second)) == "\n".join(
        [
            "first       m, the base model",
            "second      m, tinker://c",
            "compared    2 tasks; left out, as an episode failed: day-10",
            "reward      0.625 -> 0.975",
            "difference  +0.350, 95% interval -4.732 to +5.432, p = 0.542",
            "tasks       1 better, 1 worse, 0 the same",
            "pass@1      33.3 % -> 50.0 %",
            "pass@2      50.0 % -> 66.7 %",
            "above 0.2   80.0 % -> 100.0 %",
            "",
            "most changed:",
            "  day-1  0.25 -> 1.00  +0.75",
            "  day-2  1.00 -> 0.95  -0.05",
        ]
    )


def test_only_the_most_changed_tasks_are_listed() -> None:
    """Ten of the eleven that changed, and how many there are."""
    names = [f"t{i}" for i in range(12)]
    first = evaluation({name: [0.0, 0.0] for name in names})
    second = evaluation({name: [i / 20, i / 20] for i, name in enumerate(names)})

    lines = comparison_table(first, second, compare(first, second)).splitlines()

    assert lines[lines.index("most changed, of 11:") + 1 :] == [
        f"  {f't{i}'.ljust(3)}  0.00 -> {i / 20:.2f}  +{i / 20:.2f}" for i in range(11, 1, -1)
    ]


def test_a_clear_difference_has_a_small_p() -> None:
    """Below a thousandth its digits say nothing."""
    first = evaluation({f"t{i}": [0.0, 0.0] for i in range(30)})
    second = evaluation({f"t{i}": [0.5, 0.5 + i / 100] for i in range(30)})

    assert "p < 0.001" in comparison_table(first, second, compare(first, second))
