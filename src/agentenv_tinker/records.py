"""Files each episode in the framework's run index, under the run group of its training step.

`<run>/train/step-<n>` holds a training step's episodes and `<run>/eval/step-<n>` the evaluation's before it, so that
the explorer shows a task's rollouts by training step.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from agentenv_tinker import framework


def run_group(run_name: str, part: str, step: int) -> str:
    """The run group of `part` ("train" or "eval") at training step `step`."""
    return f"{run_name}/{part}/step-{step}"


@dataclass(eq=False)
class RunFile:
    """An episode's entry in the run index, where it is opened: once, and never after it was closed."""

    task: framework.Task
    run_group: str

    _turns: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)  # the store's two writes, in their order
    _opened: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)

    async def open(self, episode: framework.Episode) -> None:
        """List `episode` as running, off the event loop."""
        async with self._turns:
            if not self._opened and not self._closed:
                self._opened = True
                await asyncio.to_thread(framework.file_run, episode, self.task, run_group=self.run_group)

    async def close(self, episode: framework.Episode, status: framework.RunStatus, error: str | None) -> None:
        """Mark `episode` ended, off the event loop."""
        async with self._turns:
            self._closed = True
            if self._opened:
                await asyncio.to_thread(framework.file_run_end, episode, self.task, status, error)
