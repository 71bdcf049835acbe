"""Tells a person how a run is getting on: a line per training step, and the episodes played in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentenv_tinker.episode import episodes_played

Say = Callable[[str], None]

_LOOK_SECONDS = 0.25
_EPISODES_SECONDS = 15.0  # at most one line of episodes in this time


@contextlib.contextmanager
def quiet_console(log: Path) -> Iterator[None]:
    """Send what libraries print, log lines and progress bars, to `log` for the block."""
    root = logging.getLogger()
    with (
        log.open("a", buffering=1) as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        try:
            yield
        finally:
            for handler in [each for each in root.handlers if getattr(each, "stream", None) is stream]:
                root.removeHandler(handler)  # it was made meanwhile, and its stream closes here


@contextlib.asynccontextmanager
async def told(folder: Path, *, steps: int, say: Say, episodes: bool = True) -> AsyncIterator[None]:
    """Tell of each of the `steps` training steps as its metrics arrive in `folder`, for the block; and of the episodes
    now and then, unless it is within a block that does."""
    metrics = folder / "metrics.jsonl"
    known = len(await asyncio.to_thread(_lines, metrics))  # those of an earlier try, where this one goes on
    telling = asyncio.create_task(_tell(metrics, steps, known, say, episodes=episodes))
    try:
        yield
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling


async def _tell(metrics: Path, steps: int, seen: int, say: Say, *, episodes: bool) -> None:
    quiet_since, last = asyncio.get_running_loop().time(), episodes_played()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        lines = await asyncio.to_thread(_lines, metrics)
        for line in lines[seen:]:
            say(step_line(json.loads(line), steps))
        now, played = asyncio.get_running_loop().time(), episodes_played()
        if len(lines) > seen:
            seen, quiet_since, last = len(lines), now, played
        elif episodes and played != last and now - quiet_since > _EPISODES_SECONDS:
            say(f"episodes: {played[0]} played, {played[1]} under way")
            quiet_since, last = now, played


def _lines(metrics: Path) -> list[str]:
    """The whole lines written so far."""
    return metrics.read_text().split("\n")[:-1] if metrics.exists() else []


def step_line(metrics: Mapping[str, Any], steps: int) -> str:
    """One line for the metrics of a training step, supervised or RL, or of the evaluation after the last."""
    if (loss := metrics.get("train_mean_nll")) is not None:
        return f"warm start, step {metrics['step'] + 1}/{steps}: loss {loss:.3f}"
    parts = []
    step = metrics.get("progress/batch")
    if (held := metrics.get("test/env/all/reward/total")) is not None:
        parts.append(f"held-out reward {held:.3f}")
    if (reward := metrics.get("env/all/reward/total")) is not None:
        parts.append(f"reward {reward:.3f}")
        parts.append(f"KL {metrics.get('optim/kl_sample_train_v1', float('nan')):.1e}")
    elif step is not None:
        parts.append("every group failed; not trained")
    if (seconds := metrics.get("time/total")) is not None:
        parts.append(f"{seconds:.0f} s")
    named = "final evaluation" if step is None else f"step {step + 1}/{steps}"
    return f"{named}: {', '.join(parts)}"
