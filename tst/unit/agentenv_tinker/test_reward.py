"""A reward is a task's one score, the score at a step or a function of them, and never made of what isn't there."""

import math
import re

import pytest

from agentenv_tinker.errors import EpisodeFailedError
from agentenv_tinker.reward import reward_of, reward_problem


def mean(scores):
    return sum(scores.values()) / len(scores)


@pytest.mark.parametrize(
    ("rule", "steps", "problem"),
    [
        (None, ["score"], None),
        ("score", ["score", "other"], None),
        (mean, [], None),
        (None, [], "it records no score"),
        ("score", [], "it records no score"),
        (
            None,
            ["a", "b"],
            "it records a score at each of 'a', 'b'; name the one that is its reward with reward=<step id>",
        ),
        ("c", ["a", "b"], "it records no score at step 'c'; it records one at 'a', 'b'"),
    ],
)
def test_a_rule_that_can_make_no_reward_says_which_steps_it_could_use(rule, steps, problem):
    """Before an episode is played."""
    assert reward_problem(rule, steps) == problem


@pytest.mark.parametrize(
    ("rule", "scores", "steps", "reward"),
    [
        (None, {"score": 0.25}, ["score"], 0.25),
        ("b", {"a": 1.0, "b": 0.0}, ["a", "b"], 0.0),
        (mean, {"a": 1.0, "b": 0.0}, ["a", "b"], 0.5),
        (None, {"score": -3.0}, ["score"], -3.0),
    ],
)
def test_a_reward_is_made_by_its_rule(rule, scores, steps, reward):
    """Scores are as the run recorded them, below zero too."""
    assert reward_of(rule, scores, steps) == reward


@pytest.mark.parametrize(
    ("rule", "scores", "message"),
    [
        (None, {}, "the run recorded no score at step 'score'; it recorded {}"),
        (None, {"other": 1.0}, "the run recorded no score at step 'score'; it recorded {'other': 1.0}"),
        ("score", {"score": math.nan}, "the score at step 'score' is nan"),
        (None, {"score": math.inf}, "the score at step 'score' is inf"),
        (mean, {"score": math.nan}, "the reward function's value is nan"),
    ],
)
def test_a_score_that_is_missing_or_no_number_is_a_failed_episode(rule, scores, message):
    """Neither trains as a zero."""
    with pytest.raises(EpisodeFailedError, match=re.escape(message)):
        reward_of(rule, scores, ["score"])
