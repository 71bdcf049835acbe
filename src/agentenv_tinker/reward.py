"""Turns the scores that an episode recorded into its reward, by the framework's own rules."""

import math
from collections.abc import Callable, Mapping, Sequence

from agentenv_tinker.errors import EpisodeFailedError

RewardRule = str | Callable[[Mapping[str, float]], float] | None
"""A step's id, a function of the scores by step id, or None for the one score that a task records."""


def reward_problem(rule: RewardRule, scoring_steps: Sequence[str]) -> str | None:
    """Why `rule` can't make a reward of a task that scores at `scoring_steps`, or None where it can."""
    if callable(rule):
        return None
    if not scoring_steps:
        return "it records no score"
    named = ", ".join(repr(step) for step in scoring_steps)
    if rule is None and len(scoring_steps) > 1:
        return f"it records a score at each of {named}; name the one that is its reward with reward=<step id>"
    if rule is not None and rule not in scoring_steps:
        return f"it records no score at step {rule!r}; it records one at {named}"
    return None


def reward_of(rule: RewardRule, scores: Mapping[str, float], scoring_steps: Sequence[str]) -> float:
    """The reward of an episode that recorded `scores`.

    Raises EpisodeFailedError for a score that is missing or isn't a finite number: neither may train as a 0.
    """
    if callable(rule):
        return _finite(float(rule(scores)), "the reward function's value", scores)
    step = scoring_steps[0] if rule is None else rule
    if step not in scores:
        raise EpisodeFailedError(f"the run recorded no score at step {step!r}; it recorded {dict(scores)}")
    return _finite(scores[step], f"the score at step {step!r}", scores)


def _finite(value: float, what: str, scores: Mapping[str, float]) -> float:
    if not math.isfinite(value):
        raise EpisodeFailedError(f"{what} is {value}, of the scores {dict(scores)}")
    return value
