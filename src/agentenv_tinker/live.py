"""A live line at the foot of a terminal while a run trains: step, rewards, episodes, time left."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from agentenv_tinker.episode import episodes_played
from agentenv_tinker.progress import Say

_REWARD = "env/all/reward/total"
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = 24  # rewards in the sparkline, the newest
_A_SECOND = 2  # refreshes


@contextlib.contextmanager
def watched(folder: Path, stream: TextIO) -> Iterator[Say]:
    """Say lines on `stream` for the block; where it is a terminal, above a live line on the run in `folder`.

    It is one too where TTY_COMPATIBLE is 1, as rich has it: a container's output comes to a terminal through a pipe.
    """
    began = time.monotonic()
    if not stream.isatty() and os.environ.get("TTY_COMPATIBLE") != "1":
        yield lambda line: print(f"[{_clock(time.monotonic() - began)}] {line}", file=stream, flush=True)
        return
    console = Console(file=stream, force_terminal=True, highlight=False, soft_wrap=True)
    pulse = Pulse(folder, began)
    with Live(
        get_renderable=pulse.line,
        console=console,
        refresh_per_second=_A_SECOND,
        transient=True,
        redirect_stdout=False,  # a run redirects both for itself
        redirect_stderr=False,
    ):
        yield lambda line: console.print(Text(f"[{_clock(time.monotonic() - began)}] {line}"))


class Pulse:
    """How the run in `folder` is getting on, as a line. It reads the folder's metrics as they grow."""

    def __init__(self, folder: Path, began: float) -> None:
        self._folder = folder
        self._began = began
        self._read = 0  # bytes of the metrics
        self._metrics: list[Mapping[str, Any]] = []
        self._first: tuple[float, int] | None = None  # when the first step was seen here, and how many there were then

    def line(self) -> Text:
        """The line, of now. Any thread may ask for it."""
        self._look()
        played, under_way = episodes_played()
        parts = [_clock(time.monotonic() - self._began), *self._training()]
        parts.append(f"episodes: {played} played, {under_way} under way")
        return Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")

    def _look(self) -> None:
        path = self._folder / "metrics.jsonl"
        if not path.exists() or path.stat().st_size == self._read:
            return
        self._read = path.stat().st_size
        read = [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]
        self._metrics = [each for each in read if "progress/batch" in each]
        if self._first is None:
            self._first = time.monotonic(), len(self._metrics)

    def _training(self) -> Iterator[str]:
        made = len(self._metrics)
        if not made:
            return
        steps = json.loads((self._folder / "run.json").read_text())["steps"]
        yield f"step {made}/{steps}"
        if rewards := [each[_REWARD] for each in self._metrics if _REWARD in each]:
            yield f"reward {sparkline(rewards[-_SHOWN:])} {rewards[-1]:.3f}"
        if held := [each[f"test/{_REWARD}"] for each in self._metrics if f"test/{_REWARD}" in each]:
            yield f"held out {held[-1]:.3f}"
        if made < steps and (seconds := self._a_step()) is not None:
            yield f"about {_clock(seconds * (steps - made))} left"

    def _a_step(self) -> float | None:
        """Seconds that a step takes: as measured here, or as the first one says."""
        assert self._first is not None
        since, then = self._first
        more = len(self._metrics) - then
        return (time.monotonic() - since) / more if more else self._metrics[-1].get("time/total")


def sparkline(values: list[float]) -> str:
    """A bar for each value, from the least to the greatest of them."""
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    return "".join(_BARS[min(int((value - low) / spread * len(_BARS)), len(_BARS) - 1)] for value in values)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:02d}:{rest:02d}"
