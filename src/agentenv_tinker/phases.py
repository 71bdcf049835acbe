"""Where a training step's time went: each moment goes to one phase, by the spans that the cookbook recorded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PHASES = ("training", "evaluation", "sampling", "env", "other")
"""In the order in which they claim a moment that several of them share: what waits for the model is not waiting for an
environment, and `other` is what is left."""

_SPANS = {
    "train_step": "training",
    "compute_kl_sample_train": "training",
    "save_checkpoint": "training",
    "save_checkpoint_and_get_sampling_client": "training",
    "run_evaluations_parallel": "evaluation",
    "policy_sample": "sampling",
    "env_initial_observation": "env",
    "env_step": "env",
    "compute_group_rewards": "env",
}


def phase_seconds(spans: Iterable[Mapping[str, Any]], total: float) -> dict[str, float]:
    """The seconds of each of `PHASES` in a step that took `total` seconds; they add up to it.

    `spans` is a step's list in the cookbook's `timing_spans.jsonl`: `name`, and `wall_start` and `wall_end` in seconds
    since the step began.
    """
    edges = sorted(_edges(spans))
    open_spans = dict.fromkeys(PHASES, 0)
    seconds = dict.fromkeys(PHASES, 0.0)
    for (moment, phase, change), (until, _, _) in itertools.pairwise(edges):
        open_spans[phase] += change
        if (claims := next((each for each in PHASES if open_spans[each]), None)) is not None:
            seconds[claims] += until - moment
    seconds["other"] = max(total - sum(seconds.values()), 0.0)
    return seconds


def _edges(spans: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, str, int]]:
    for span in spans:
        if (phase := _SPANS.get(span["name"])) is not None:
            yield span["wall_start"], phase, 1
            yield span["wall_end"], phase, -1
