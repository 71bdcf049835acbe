"""Where a step's time went."""

import math

from hypothesis import given
from hypothesis import strategies as st

from agentenv_tinker.phases import PHASES, phase_seconds


def span(name: str, start: float, end: float) -> dict[str, object]:
    return {"name": name, "wall_start": start, "wall_end": end}


def test_a_moment_that_several_phases_share_is_counted_once() -> None:
    """Environments work while others are sampled: only what waits for them alone is theirs."""
    spans = [
        span("env_initial_observation", 0, 2),
        span("policy_sample", 1, 5),
        span("env_step", 4, 6),
        span("policy_sample", 5.5, 7),
        span("train_step", 7, 9.5),
        span("sampling", 0, 7),  # of the whole rollouts: what it holds is counted
    ]
    assert phase_seconds(spans, 10) == {
        "training": 2.5,
        "evaluation": 0,
        "sampling": 5.5,
        "env": 1.5,
        "other": 0.5,
    }


def test_what_an_evaluation_samples_is_evaluation() -> None:
    spans = [span("run_evaluations_parallel", 0, 4), span("policy_sample", 1, 3), span("policy_sample", 4, 5)]
    assert phase_seconds(spans, 5) == {"training": 0, "evaluation": 4, "sampling": 1, "env": 0, "other": 0}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["policy_sample", "env_step", "train_step", "run_evaluations_parallel", "sampling"]),
            st.integers(0, 50),
            st.integers(0, 50),
        )
    )
)
def test_the_phases_add_up_to_the_step(drawn: list[tuple[str, int, int]]) -> None:
    """Whatever overlaps."""
    spans = [span(name, start, start + length) for name, start, length in drawn]
    seconds = phase_seconds(spans, 100)
    assert seconds.keys() == set(PHASES)
    assert math.isclose(sum(seconds.values()), 100)
