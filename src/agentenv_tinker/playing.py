"""Plays a split with a model that isn't trained meanwhile: the rollouts and what they came to, in a folder.

An episode is a group of its own, so that one that fails costs no other; it is tried again as in training before it
counts as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import tinker
from tinker_cookbook import checkpoint_utils
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.rl.rollout_logging import serialize_rollout_summaries
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.utils import logtree

from agentenv_tinker.bundle import Playable
from agentenv_tinker.config import EvalConfig
from agentenv_tinker.dataset import AgentEnvDatasetBuilder, EpisodeGroupBuilder
from agentenv_tinker.errors import BundleError, ConfigError, EpisodeFailedError, TrainingError, boundary, described
from agentenv_tinker.evaluation import Evaluation, Failure, Plan, evaluation_of, read_rollouts
from agentenv_tinker.preparation import held_out, prepared
from agentenv_tinker.progress import Say, told

_SHOWN = 4  # episodes that the page has in full


async def evaluated(config: EvalConfig, *, say: Say) -> Evaluation:
    """Evaluate as `config` says, into its folder: `evaluation.json`. `say` is given a line for each phase.

    Raises ConfigError, BundleError, SandboxError or ServiceError before anything is played, leaving nothing behind,
    and EpisodeFailedError or TrainingError after. Whatever ends it, every episode is torn down first.
    """

    def splits(dataset: AgentEnvDatasetBuilder, bundle: Playable) -> AgentEnvDatasetBuilder:
        dataset = held_out(config, dataset, bundle, option="--split")
        say(f"bundle: {config.bundle}, {dataset.eval_tasks} tasks to play ({dataset.test_split})")
        return dataset

    checkpoint = await asyncio.to_thread(_given_checkpoint, config.checkpoint) if config.checkpoint else None
    check = functools.partial(_sampler, config.model, checkpoint)
    async with contextlib.AsyncExitStack() as stack:
        dataset = await stack.enter_async_context(prepared(config, splits, say=say, check=check))
        stack.enter_context(
            boundary(TrainingError, "the evaluation stopped", tinker.TinkerError, TinkerCookbookError, OSError)
        )
        await stack.enter_async_context(told(config.folder, steps=0, say=say))
        say(f"playing: {dataset.eval_tasks} x {config.samples} episodes, {checkpoint or 'the base model'}")
        return await evaluate(
            dataset,
            checkpoint=checkpoint,
            label="evaluation",
            step=None if checkpoint else 0,
            folder=config.folder,
            max_tokens=config.max_tokens,
            temperature=config.eval_temperature,
            samples=config.samples,
            pass_threshold=config.pass_threshold,
            thresholds=config.above,
        )


def _given_checkpoint(given: str) -> str:
    """The sampler weights that `given` names: itself, a `tinker://` path, or the last of a run's folder. Blocks."""
    if given.startswith("tinker://"):
        return given
    last = checkpoint_utils.get_last_checkpoint(given, "sampler_path")
    if last is None or last.sampler_path is None:
        raise ConfigError(f"{given!r} is neither a tinker:// path nor a run's folder that has sampler weights")
    return str(last.sampler_path)


async def evaluate(
    dataset: AgentEnvDatasetBuilder,
    *,
    checkpoint: str | None,
    label: str,
    step: int | None,
    folder: Path,
    max_tokens: int,
    temperature: float = 1.0,
    samples: int = 1,
    pass_threshold: float = 1.0,
    thresholds: Sequence[float] = (),
) -> Evaluation:
    """Play the test split of `dataset`, each task `samples` times, and write what it came to.

    `checkpoint` is a `tinker://` path of sampler weights, or None for the base model; `step` the training steps behind
    it, or None where that isn't known. Into `folder` go `<label>.json`, the evaluation, and the cookbook's own records
    of the rollouts: `<label>_rollout_summaries.jsonl` and a page, `<label>.html`. The framework files the episodes
    under `<run>/eval/<label>/step-<step>`.

    Raises EpisodeFailedError where no episode was scored, and the errors of the Tinker SDK where no model is sampled.
    """
    plan = Plan(
        label=label,
        step=step,
        model=dataset.model_name,
        checkpoint=checkpoint,
        split=_split(dataset),
        tasks=await asyncio.to_thread(planned_tasks, dataset),
        samples=samples,
        temperature=temperature,
        pass_threshold=pass_threshold,
        thresholds=tuple(thresholds),
    )
    sampler = await _sampler(dataset.model_name, checkpoint)
    policy = TinkerTokenCompleter(sampler, max_tokens=max_tokens, temperature=temperature)
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    with logtree.init_trace(f"Evaluation {label}", path=folder / f"{label}.html"):
        played = await _played(_groups(dataset, plan), policy)
    return await asyncio.to_thread(_concluded, plan, played, folder)


def _concluded(plan: Plan, played: Sequence[TrajectoryGroup | str], folder: Path) -> Evaluation:
    """What the episodes of `plan`, in its order, came to, recorded in `folder`. Blocks."""
    failures = [Failure(plan.tasks[i // plan.samples], why) for i, why in enumerate(played) if isinstance(why, str)]
    records = folder / f"{plan.label}_rollout_summaries.jsonl"
    _write_records(records, plan, [group for group in played if not isinstance(group, str)])
    evaluation = evaluation_of(plan, read_rollouts(records), failures)
    evaluation.write(folder / f"{plan.label}.json")
    return evaluation


def _split(dataset: AgentEnvDatasetBuilder) -> str:
    if dataset.test_split is None:
        raise BundleError("there is no split to evaluate on")
    return dataset.test_split


def planned_tasks(dataset: AgentEnvDatasetBuilder) -> tuple[str, ...]:
    """The names of the tasks that the test split of `dataset` plays, in order. Blocks."""
    return tuple(task.name for task in dataset.playable().split(_split(dataset))[: dataset.eval_tasks])


async def _sampler(model: str, checkpoint: str | None) -> tinker.SamplingClient:
    """A client of the model that is evaluated. Raises ConfigError for a checkpoint that isn't there, or isn't its."""
    service = tinker.ServiceClient()
    if checkpoint is None:
        return await service.create_sampling_client_async(base_model=model)
    with boundary(ConfigError, f"checkpoint {checkpoint!r} can't be played", tinker.TinkerError):
        sampler = await service.create_sampling_client_async(model_path=checkpoint)
    base = await sampler.get_base_model_async()
    if base != model:
        raise ConfigError(f"checkpoint {checkpoint!r} is of model {base!r}, not of {model!r}; name it with --model")
    return sampler


def _groups(dataset: AgentEnvDatasetBuilder, plan: Plan) -> list[EpisodeGroupBuilder]:
    """A group for each episode: those of a task side by side, which are one prompt to the sampler."""
    part, step = f"eval/{plan.label}", plan.step or 0
    return [
        EpisodeGroupBuilder(dataset, plan.split, index=index, size=1, part=part, step=step)
        for index in range(len(plan.tasks))
        for _ in range(plan.samples)
    ]


async def _played(groups: Sequence[EpisodeGroupBuilder], policy: TokenCompleter) -> list[TrajectoryGroup | str]:
    """Each group's rollout, or why it failed."""
    async with asyncio.TaskGroup() as tasks:
        playing = [tasks.create_task(_outcome(group, policy, shown=i < _SHOWN)) for i, group in enumerate(groups)]
    return [each.result() for each in playing]


async def _outcome(group: EpisodeGroupBuilder, policy: TokenCompleter, *, shown: bool) -> TrajectoryGroup | str:
    try:
        with logtree.optional_enable_logging(enable=shown):
            return await do_group_rollout(group, policy, strategy=RetryOnFailure())
    except (EpisodeFailedError, TinkerCookbookError, tinker.TinkerError) as error:
        return described(error)


def _write_records(path: Path, plan: Plan, groups: Sequence[TrajectoryGroup]) -> None:
    records = serialize_rollout_summaries(
        split=f"eval/{plan.label}",
        iteration=plan.step or 0,
        trajectory_groups_P=groups,
        taglist_P=[["eval"] for _ in groups],
        sampling_client_steps_P=[plan.step for _ in groups],
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def recorded_evaluations(
    folder: Path,
    dataset: AgentEnvDatasetBuilder,
    *,
    start: str | None = None,
    pass_threshold: float = 1.0,
    thresholds: Sequence[float] = (),
) -> list[Evaluation]:
    """The evaluations of the test split that the cookbook's `rl.train` made by itself, in the order of their steps.

    `start` is the checkpoint that it started from, or None for the base model; those of later steps were not kept. Each
    is read from its `iteration_*/` below `folder`, the log path, and written to `evaluations/step-<n>.json` there.
    One that scored no episode is left out. Blocks.
    """
    tasks = planned_tasks(dataset)
    found: list[Evaluation] = []
    for records in sorted(folder.glob("iteration_*/eval_test_rollout_summaries.jsonl")):
        step = int(records.parent.name.removeprefix("iteration_"))
        plan = Plan(
            label=f"step-{step}",
            step=step,
            model=dataset.model_name,
            checkpoint=None if step else start,
            split=_split(dataset),
            tasks=tasks,
            samples=dataset.eval_group_size,
            pass_threshold=pass_threshold,
            thresholds=tuple(thresholds),
        )
        if rollouts := read_rollouts(records):
            found.append(evaluation_of(plan, rollouts))
            found[-1].write(folder / "evaluations" / f"{plan.label}.json")
    return found
