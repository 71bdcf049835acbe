"""Two evaluations of the same tasks, compared task by task."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv_tinker.comparison import Change, Comparison, compare, paired_t, t_quantile, t_within
from agentenv_tinker.errors import ConfigError
from agentenv_tinker.evaluation import Evaluation, Plan, Rollout, evaluation_of


def evaluation(**rewards: list[float]) -> Evaluation:
    """The evaluation of two samples of each task, of which those without a reward failed."""
    plan = Plan(label="e", step=0, model="m", checkpoint=None, split="held", tasks=tuple(rewards), samples=2)
    rollouts = [
        Rollout(task=task, reward=reward, scores={}, flags={}, amounts={}, stop_reason="completed")
        for task, each in rewards.items()
        for reward in each
    ]
    return evaluation_of(plan, rollouts)


def test_the_tasks_are_paired_and_one_that_failed_is_left_out_and_named() -> None:
    """The means, the interval and the counts are of the four tasks that failed in neither."""
    first = evaluation(a=[0, 0], b=[0, 0.2], c=[0.5, 0.5], d=[1, 0.8], e=[1.0], f=[0, 0])
    second = evaluation(f=[1.0], a=[1, 0], b=[0.6, 0.6], c=[0.5, 0.5], d=[0.7, 0.7], e=[1, 1])

    compared = compare(first, second)

    # differences 0.5, 0.5, 0, -0.2: mean 0.2, standard error sqrt(0.38 / 3) / 2; t(0.975, 3) = 3.182446
    reach = 3.182446 * math.sqrt(0.38 / 3) / 2
    assert compared == Comparison(
        tasks=4,
        left_out=("e", "f"),
        first=pytest.approx(0.375),
        second=pytest.approx(0.575),
        difference=pytest.approx(0.2),
        interval=(pytest.approx(0.2 - reach, abs=1e-6), pytest.approx(0.2 + reach, abs=1e-6)),
        p_value=pytest.approx(1 - within(0.2 / (math.sqrt(0.38 / 3) / 2), 3), abs=1e-6),
        changes=(
            Change(task="a", first=0.0, second=0.5),
            Change(task="b", first=0.1, second=0.6),
            Change(task="d", first=0.9, second=0.7),
        ),
    )
    assert (compared.better, compared.worse, compared.same) == (2, 1, 1)


def test_tasks_that_all_changed_alike_have_no_p_value() -> None:
    """Their differences show no spread to test against."""
    compared = compare(evaluation(a=[0, 0], b=[0.5, 0.5]), evaluation(a=[0.5, 0.5], b=[1, 1]))

    assert (compared.interval, compared.p_value) == ((0.5, 0.5), None)


def test_a_single_task_has_no_interval() -> None:
    """One difference says nothing of how they spread."""
    assert paired_t([0.5]) == (None, None)


def test_evaluations_of_different_tasks_are_refused() -> None:
    """The error says how many are in both, and names some of the others."""
    first = evaluation(a=[1, 1], b=[1, 1])
    second = evaluation(a=[1, 1], c=[1, 1], d=[1, 1], e=[1, 1], f=[1, 1])

    with pytest.raises(
        ConfigError,
        match=r"^the evaluations are of different tasks: 1 are in both, 1 \(b\) only in the first"
        r" and 4 \(c, d, e, \.\.\.\) only in the second; play the same split, and as many of its tasks$",
    ):
        compare(first, second)


def test_evaluations_without_a_task_that_failed_in_neither_are_refused() -> None:
    """There is nothing to pair."""
    with pytest.raises(ConfigError, match="no task can be compared"):
        compare(evaluation(a=[1.0], b=[1, 1]), evaluation(a=[1, 1], b=[1.0]))


@pytest.mark.parametrize(
    ("degrees", "value"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (10, 2.22814), (30, 2.04227), (199, 1.97196)],
)
def test_quantiles_are_those_of_the_printed_tables(degrees: int, value: float) -> None:
    """Two-sided, at 95 %."""
    assert t_quantile(0.95, degrees) == pytest.approx(value, abs=1e-5 * value)


@given(st.floats(0, 20), st.integers(1, 60))
def test_the_series_is_the_integral_of_students_density(t: float, degrees: int) -> None:
    """For odd and even degrees of freedom alike."""
    assert t_within(t, degrees) == pytest.approx(within(t, degrees), abs=1e-6)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30))
def test_the_interval_lies_about_the_mean_and_holds_0_just_when_p_is_above_5_percent(differences: list[float]) -> None:
    """The interval and the p-value are one test."""
    interval, p_value = paired_t(differences)

    assert interval is not None
    low, high = interval
    assert (low + high) / 2 == pytest.approx(statistics.fmean(differences), abs=1e-9)
    if p_value is not None and abs(p_value - 0.05) > 1e-6:
        assert (low <= 0 <= high) == (p_value > 0.05)


def within(t: float, degrees: int, *, slices: int = 2000) -> float:
    """The integral of Student's density from -t to t, by Simpson's rule."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    step = t / slices
    heights = [scale * (1 + (i * step) ** 2 / degrees) ** (-(degrees + 1) / 2) for i in range(slices + 1)]
    return 2 * step / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
