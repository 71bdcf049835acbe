"""The only door to agentenv-framework, its non-public parts included.

Written for the version range in pyproject.toml; tst/tinker/test_framework.py fails when one of the parts used here
moves. What leaves this module is ours or public there: prepared bundles, episode specs, episodes, turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_env.bundle import BundleError as FrameworkBundleError
from agent_env.bundle import BundleKind, PreparedBundle, parse_bundle, prepare_bundle
from agent_env.bundle.installed import locate_bundle
from agent_env.runner import store as run_index
from agent_env.runner.runner import RunRecord, RunStatus, run_outcome
from agent_env.store.routing import namespace_routing, run_scope
from agent_env.task import EpisodeError, EpisodeSpec, Task
from agent_env.task.episode import Episode, Turn
from agent_env.task.episode.run import TurnTools

__all__ = [
    "Episode",
    "EpisodeError",
    "EpisodeSpec",
    "FrameworkBundleError",
    "PreparedTask",
    "RunStatus",
    "Task",
    "Turn",
    "TurnTools",
    "failed_step",
    "file_run",
    "file_run_end",
    "prepare",
    "routing",
    "run_status",
    "scoring_steps",
]

RUNNER = "agentenv-tinker"  # who filed a run, in the framework's run index


@dataclass(frozen=True)
class PreparedTask:
    """One task of a prepared bundle."""

    name: str
    """The task's name in its bundle, such as `day-0001`."""
    task: Task
    """The framework's own task, ready to become an episode."""


@contextmanager
def routing() -> Iterator[None]:
    """Resolve `@local` ids in this process for the length of the block, as `agent-env run` does."""
    with namespace_routing():
        yield


def prepare(source: str, *, sandbox: str | None) -> dict[str, tuple[PreparedTask, ...]]:
    """Write and build what a bundle needs, as the framework's OpenEnv server does, and return its splits.

    The split `all` holds every task; each eval is a split of its own name, in the eval's order. The agent that the
    trainer plays need not exist. Blocks for seconds to minutes (image builds). Raises FrameworkBundleError.
    """
    root, id_root = locate_bundle(source)
    entries = parse_bundle(Path(root), id_root=id_root).entries
    with routing():
        prepared = prepare_bundle(
            root,
            tasks=[entry.name for entry in entries if entry.kind is BundleKind.TASK],
            evals=[entry.name for entry in entries if entry.kind is BundleKind.EVAL],
            sandbox=sandbox,
            id_root=id_root,
            played=True,
        )
    return _splits(prepared)


def _splits(prepared: PreparedBundle) -> dict[str, tuple[PreparedTask, ...]]:
    by_id = {task.id: PreparedTask(entry.name, task) for entry, task in prepared.tasks}
    splits = {"all": tuple(by_id.values())}
    for planned in prepared.plan.evals:
        if planned.entry.name == "all":
            raise FrameworkBundleError(["eval 'all' has the name of the split that holds every task; rename it"])
        splits[planned.entry.name] = tuple(by_id[reference.id] for reference in planned.references)
    return splits


def scoring_steps(task: Task) -> tuple[str, ...]:
    """The ids of the steps at which a run of `task` records a score, as the OpenEnv server finds them."""
    return tuple(step.id for step in task.steps if getattr(step, "verifier_id", None))


def run_status(episode: Episode, error: BaseException | None = None) -> tuple[RunStatus, str | None]:
    """How an ended episode's run is recorded, by the framework's own rule, and why it failed if it did.

    `Episode.result()` alone would pay a run one of whose steps failed softly; this rule calls it FAILED.
    """
    return run_outcome(episode._context, error)


def failed_step(episode: Episode) -> str | None:
    """The step that failed an episode's run, with its error, or None while none has."""
    failures = [failure for failure in episode._context.metadata.get("failed_steps") or [] if isinstance(failure, dict)]
    if not failures:
        return None
    last = failures[-1]
    return f"step {last.get('step_id')!r} failed: {last.get('error_type')}: {last.get('error')}"


def file_run(episode: Episode, task: Task, *, run_group: str, metadata: Mapping[str, Any]) -> None:
    """List an episode in the framework's run index as running, under `run_group`. Blocks on the store."""
    record = RunRecord(
        run_id=episode.id,
        runner=RUNNER,
        task_id=task.id,
        task_version=task.version,
        instance_id=episode.id,
        overrides={"metadata": {"run_group_id": run_group, **metadata}},
    )
    with routing(), run_scope(task.id):
        run_index.insert_run(record)
        run_index.set_running(record.run_id)


def file_run_end(episode: Episode, task: Task, status: RunStatus, error: str | None) -> None:
    """Mark an episode's run ended in the run index, unless it already is. Blocks on the store."""
    with routing(), run_scope(task.id):
        run_index.mark_terminal(episode.id, status, error)
