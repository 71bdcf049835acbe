"""The verifier: the score of a profit."""

import pytest


@pytest.mark.parametrize(
    ("profit", "score"),
    [
        pytest.param(None, 0.0, id="nothing-submitted"),
        pytest.param(0, 0.2, id="idle"),
        pytest.param(400, 0.6, id="half-of-the-best"),
        pytest.param(800, 1.0, id="the-best"),
        pytest.param(-100, 0.1, id="a-small-loss"),
        pytest.param(-200, 0.0, id="a-quarter-of-the-best-lost"),
        pytest.param(-5000, 0.0, id="a-large-loss"),
    ],
)
def test_score_of_a_profit(verify, profit, score):
    """The score is linear in profit through 0.2 for idle and 1 for the best, never below 0, and 0 for no schedule."""
    assert verify.score(profit, 800) == pytest.approx(score)
