"""Files each episode in the framework's run index, under the run group of its training step.

`<run>/train/step-<n>` holds a training step's episodes and `<run>/eval/step-<n>` the evaluation's before it, so that
the explorer shows a task's rollouts by training step.
"""

import asyncio

from agentenv_tinker import framework


def run_group(run_name: str, split: str, step: int) -> str:
    """The run group of `split` ("train" or "eval") at training step `step`."""
    return f"{run_name}/{split}/step-{step}"


async def file_start(episode: framework.Episode, task: framework.Task, *, run_group: str) -> None:
    """List an episode as running, off the event loop."""
    await asyncio.to_thread(framework.file_run, episode, task, run_group=run_group, metadata={})


async def file_end(
    episode: framework.Episode, task: framework.Task, status: framework.RunStatus, error: str | None
) -> None:
    """Mark an episode ended, off the event loop."""
    await asyncio.to_thread(framework.file_run_end, episode, task, status, error)
