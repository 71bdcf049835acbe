"""Recorded rollouts as conversations to read, and which of a run's are worth reading."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv_tinker.evaluation import UNKNOWN_STOP, rollout_of
from agentenv_tinker.history import History


@dataclass(frozen=True)
class Said:
    """A part of a conversation."""

    who: str
    """prompt, model, call, answer, or problem: what kept a message from being played as it was meant."""
    text: str


@dataclass(frozen=True)
class Transcript:
    """A rollout to read. Long texts are clipped, as the cookbook's record has them; the framework's has them whole."""

    task: str
    task_id: str
    run: str
    """Its run in the framework's records."""
    group: str
    """Its run group there."""
    reward: float
    ended_by: str
    said: tuple[Said, ...]


@dataclass(frozen=True)
class Pair:
    """Two rollouts to read side by side."""

    title: str
    left: tuple[str, Transcript]
    right: tuple[str, Transcript]
    """Each after what it is."""


def transcript_of(record: Mapping[str, Any], group: str) -> Transcript:
    """A line of the cookbook's record of rollouts, of run group `group`, as a conversation. Raises KeyError."""
    rollout, logs = rollout_of(record), record["steps"][-1]["logs"]
    said = tuple(part for step in record["steps"] for part in _said(step["logs"]))
    ended_by = rollout.stop_reason.replace("_", " ") if rollout.stop_reason != UNKNOWN_STOP else "unknown"
    return Transcript(rollout.task, logs.get("task_id", ""), logs.get("run", ""), group, rollout.reward, ended_by, said)


def _said(logs: Mapping[str, str]) -> Iterator[Said]:
    if "prompt" in logs:
        yield Said("prompt", logs["prompt"])
    if "assistant_content" in logs:
        yield Said("model", logs["assistant_content"])
    if "unparsed" in logs:
        yield Said("model", logs["unparsed"])
    number = 0
    while f"tool_call_{number}" in logs:
        yield Said("call", logs[f"tool_call_{number}"])
        yield Said("answer", logs.get(f"tool_result_{number}", ""))
        number += 1
    for name in ("parse_errors", "tool_calls_dropped"):
        if name in logs:
            yield Said("problem", logs[name])
    if "next_prompt" in logs:
        yield Said("prompt", logs["next_prompt"])


def pairs(history: History) -> list[Pair]:
    """The rollouts worth reading side by side: what training changed on one task, and good beside bad. Blocks."""
    return [*_changed(history), *_good_and_bad(history)]


def _changed(history: History) -> Iterator[Pair]:
    """The held-out tasks that gained and lost the most between the first evaluation and the last."""
    played = [(each, found) for each in history.evaluations if (found := _of_evaluation(history, each.label))]
    if len(played) < 2:
        return
    (first, before), (last, after) = played[0], played[-1]
    gains = {task: after[task].reward - before[task].reward for task in sorted(before.keys() & after.keys())}
    if not gains:
        return
    gained, lost = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
    chosen = [("The held-out task that gained the most", gained)] if gains[gained] > 0 else []
    chosen += [("The one that lost the most", lost)] if gains[lost] < 0 else []
    for title, task in chosen:
        yield Pair(f"{title}: {task}", (_called(first.label), before[task]), (_called(last.label), after[task]))


def _called(label: str) -> str:
    return {"base": "The base model", "final": "After the last step"}.get(label, label.replace("step-", "After step "))


def _good_and_bad(history: History) -> Iterator[Pair]:
    """The best and the worst rollout of the group that they differ the most in, of the first step and of the last."""
    trained = [step.number for step in history.steps if step.rollouts]
    for number in dict.fromkeys(trained[:1] + trained[-1:]):
        groups: dict[int, list[Mapping[str, Any]]] = {}
        records = history.folder / f"iteration_{number:06d}" / "train_rollout_summaries.jsonl"
        for record in _records(records):
            groups.setdefault(record["group_idx"], []).append(record)
        ordered = [sorted(group, key=_reward) for group in groups.values()]
        widest = max(ordered, key=lambda group: _reward(group[-1]) - _reward(group[0]))
        if _reward(widest[-1]) > _reward(widest[0]):
            bad, good = (transcript_of(each, f"{history.name}/train/step-{number}") for each in (widest[0], widest[-1]))
            yield Pair(f"One group of step {number + 1}: {good.task}", ("Its worst", bad), ("Its best", good))


def _of_evaluation(history: History, label: str) -> dict[str, Transcript]:
    """The first rollout of each task in an evaluation."""
    made_here = history.folder / "evaluations" / f"{label}_rollout_summaries.jsonl"
    step = label.removeprefix("step-")
    if made_here.exists():
        records, group = made_here, f"{history.name}/eval/{label}/step-{_step(history, label)}"
    else:  # rl.train made it
        records = history.folder / f"iteration_{int(step):06d}" / "eval_test_rollout_summaries.jsonl"
        group = f"{history.name}/eval/step-{step}"
    found: dict[str, Transcript] = {}
    for record in _records(records):
        read = transcript_of(record, group)
        found.setdefault(read.task, read)
    return found


def _step(history: History, label: str) -> int:
    return next((each.step or 0 for each in history.evaluations if each.label == label), 0)


def _reward(record: Mapping[str, Any]) -> float:
    return float(record["total_reward"])


def _records(path: Path) -> Sequence[Mapping[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []
