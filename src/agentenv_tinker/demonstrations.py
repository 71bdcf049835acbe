"""Reads demonstrations: for a task, the calls that play it well, in a file beside the bundle's tasks.

A line of `demonstrations.jsonl` is a JSON object: `task`, its name, and either `calls` and `reply`, or `turns`, a list
of objects with those two. A call is `{"name": ..., "arguments": {...}}`, made in a message of its own; `reply` is the
text of the message that ends the turn. The framework ignores the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv_tinker.errors import BundleError

FILE_NAME = "demonstrations.jsonl"
DEFAULT_REPLY = "Done."


@dataclass(frozen=True)
class DemonstratedCall:
    """A tool call to make."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class DemonstratedTurn:
    """What to do in a turn: the calls, one a message, and the reply that ends it."""

    calls: tuple[DemonstratedCall, ...]
    reply: str = DEFAULT_REPLY


@dataclass(frozen=True)
class Demonstration:
    """How to play a task."""

    task: str
    turns: tuple[DemonstratedTurn, ...]


def read_demonstrations(path: Path) -> list[Demonstration]:
    """The demonstrations of the file at `path`, in its order. Raises BundleError with every problem found."""
    read, problems = parse_demonstrations(path)
    if problems:
        raise BundleError("\n".join(problems))
    if not read:
        raise BundleError(f"there is no demonstration in {str(path)!r}")
    return read


def parse_demonstrations(path: Path) -> tuple[list[Demonstration], list[str]]:
    """The demonstrations of the file at `path`, and what is wrong with each line that holds none.

    Raises BundleError for a file that can't be read.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"the demonstrations {str(path)!r} can't be read: {error}") from error
    read: list[Demonstration] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                read.append(_demonstration(json.loads(line)))
            except (ValueError, BundleError) as error:
                problems.append(f"{path}, line {number}: {error}")
    return read, problems


def demonstration_line(demonstration: Demonstration) -> str:
    """The demonstration as a line of such a file, its end included."""
    turns = [
        {"calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls], "reply": turn.reply}
        for turn in demonstration.turns
    ]
    entry = {"task": demonstration.task, **(turns[0] if len(turns) == 1 else {"turns": turns})}
    return json.dumps(entry, ensure_ascii=False) + "\n"


def _demonstration(value: Any) -> Demonstration:
    entry = _object(value, "a demonstration", {"task", "turns", "calls", "reply"})
    if "turns" in entry and entry.keys() & {"calls", "reply"}:
        raise BundleError("give either turns, or the calls and reply of its only turn")
    turns = (
        entry["turns"] if "turns" in entry else [{name: entry[name] for name in ("calls", "reply") if name in entry}]
    )
    return Demonstration(_text(entry, "task"), tuple(map(_turn, _list(turns, "turns"))))


def _turn(value: Any) -> DemonstratedTurn:
    entry = _object(value, "a turn", {"calls", "reply"})
    calls = tuple(_calls(_list(entry.get("calls"), "calls")))
    return DemonstratedTurn(calls, _text(entry, "reply") if "reply" in entry else DEFAULT_REPLY)


def _calls(values: Sequence[Any]) -> Iterator[DemonstratedCall]:
    for value in values:
        entry = _object(value, "a call", {"name", "arguments"})
        yield DemonstratedCall(_text(entry, "name"), _object(entry.get("arguments", {}), "arguments", None))


def _object(value: Any, what: str, known: set[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BundleError(f"{what} must be an object, not {json.dumps(value)}")
    if known is not None and (unknown := sorted(value.keys() - known)):
        raise BundleError(f"{what} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise BundleError(f"{what} must be a list, not {json.dumps(value)}")
    return value


def _text(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        raise BundleError(f"{name} must be a text, not {json.dumps(value)}")
    return value
