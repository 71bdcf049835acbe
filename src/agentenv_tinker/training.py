"""Trains a model on a bundle: checks everything, evaluates, trains with the cookbook, and evaluates again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import chz
import tinker
from tinker_cookbook import checkpoint_utils, weights
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.rl import train as rl_train

from agentenv_tinker.bundle import Playable
from agentenv_tinker.config import RunConfig, WarmStartConfig
from agentenv_tinker.dataset import AgentEnvDatasetBuilder
from agentenv_tinker.errors import ConfigError, TrainingError, boundary, described
from agentenv_tinker.evaluation import Evaluation
from agentenv_tinker.history import SUMMARY_FILE, WARM_START_FILE
from agentenv_tinker.playing import evaluate, recorded_evaluations
from agentenv_tinker.preparation import Splits, held_out, prepared, train_split
from agentenv_tinker.progress import Say, told
from agentenv_tinker.report import reported, try_to_report
from agentenv_tinker.resuming import (
    check_kept,
    evaluated,
    interrupted,
    next_step,
    record_bundle,
    rewind,
)
from agentenv_tinker.warm_start import WarmStart, given_checkpoint, warm_start
from agentenv_tinker.workers import rollout_executor

_STATE_SECONDS = 30 * 24 * 3600  # a state that its run no longer needs is deleted by it; this is for what a kill left


@dataclass(frozen=True)
class Trained:
    """What a run came to, and where it is."""

    base: Evaluation | None
    """Of the base model, where it was asked for and `before` is of other weights."""
    before: Evaluation
    """Of the weights that RL started from."""
    after: Evaluation
    folder: Path
    checkpoint: str
    """The final sampler weights, as a `tinker://` path."""
    adapter: Path | None
    """The same weights as a PEFT adapter, in the run's folder; None where the service would not give them out."""


async def train(config: RunConfig, *, say: Say) -> Trained:
    """Train as `config` says, into its folder. `say` is given a line for each phase.

    Raises ConfigError, BundleError, SandboxError or ServiceError before anything is trained, leaving nothing behind,
    and TrainingError after. Whatever ends it, every episode is torn down first.
    """
    async with contextlib.AsyncExitStack() as stack:
        dataset = await stack.enter_async_context(prepared(config, _splits(config, say), say=say))
        await asyncio.to_thread(record_bundle, config)
        return await _run(config, dataset, say)


async def resume(folder: Path, *, say: Say) -> Trained:
    """Go on with the interrupted training run in `folder`, from the last training state that it saved.

    Raises what `train` does, and ConfigError or BundleError for a run that is finished, is still under way, or whose
    settings or bundle have changed since.
    """
    config = await asyncio.to_thread(interrupted, folder)
    check = functools.partial(check_kept, config.folder)
    async with contextlib.AsyncExitStack() as stack:
        splits = _splits(config, say)
        dataset = await stack.enter_async_context(prepared(config, splits, say=say, check=check, resumes=True))
        step = await asyncio.to_thread(next_step, config.folder)
        await asyncio.to_thread(rewind, config.folder, step)
        say(f"resuming: {step} of {config.steps} steps are made")
        return await _run(config, dataset, say)


async def _run(config: RunConfig, dataset: AgentEnvDatasetBuilder, say: Say) -> Trained:
    """All that is left to do of a run."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_training_stopped())
        stack.enter_context(_told_how_to_go_on(config, say))
        await stack.enter_async_context(told(config.folder, steps=config.steps, say=say))
        base = await _base_evaluation(config, dataset, say)
        start = await _start(config, dataset, say)
        trained = await _trained(config, dataset, start, base, say)
        await asyncio.to_thread(try_to_report, config.folder)
        return trained


async def warm_started(config: WarmStartConfig, *, say: Say) -> WarmStart:
    """Warm-start alone, as `train` does it before RL. Raises what `train` does."""

    def chosen(dataset: AgentEnvDatasetBuilder, bundle: Playable) -> AgentEnvDatasetBuilder:
        split = train_split(config, bundle)
        say(f"bundle: {config.bundle}, {len(bundle.split(split))} tasks to train on ({split})")
        return chz.replace(dataset, train_split=split, seed=config.seed)

    async with contextlib.AsyncExitStack() as stack:
        dataset = await stack.enter_async_context(prepared(config, chosen, say=say))
        stack.enter_context(_training_stopped())
        return await warm_start(config, dataset, say=say)


def _training_stopped() -> contextlib.AbstractContextManager[None]:
    return boundary(TrainingError, "training stopped", tinker.TinkerError, TinkerCookbookError, OSError)


@contextlib.contextmanager
def _told_how_to_go_on(config: RunConfig, say: Say) -> Iterator[None]:
    try:
        yield
    except BaseException:
        say(f"to go on: agentenv-tinker resume {config.folder}")
        raise


def _splits(config: RunConfig, say: Say) -> Splits:
    """What to train and to evaluate on."""

    def chosen(dataset: AgentEnvDatasetBuilder, bundle: Playable) -> AgentEnvDatasetBuilder:
        split = train_split(config, bundle)
        tasks = len(bundle.split(split))
        dataset = held_out(config, dataset, bundle, option="--eval-split")
        assert dataset.test_split is not None
        held = len(bundle.split(dataset.test_split))
        on = f"{tasks} tasks to train on ({split}), {held} held out ({dataset.test_split})"
        say(f"bundle: {config.bundle}, {on}")
        return chz.replace(
            dataset,
            train_split=split,
            groups_per_batch=config.groups_per_batch,
            group_size=config.group_size,
            epochs=math.ceil(config.steps * config.groups_per_batch / tasks),
            max_steps=config.steps,
            seed=config.seed,
        )

    return chosen


async def _base_evaluation(config: RunConfig, dataset: AgentEnvDatasetBuilder, say: Say) -> Evaluation | None:
    """The evaluation of the base model, where it is asked for, and RL won't make it by itself."""
    if not config.eval_base or not (config.checkpoint or config.warm_start_steps):
        return None
    say("evaluating the base model")
    base = await _evaluation(config, dataset, checkpoint=None, label="base", step=0)
    await asyncio.to_thread(try_to_report, config.folder)
    say(f"the base model: {base.line}")
    return base


async def _start(config: RunConfig, dataset: AgentEnvDatasetBuilder, say: Say) -> str | None:
    """The training state that RL starts from: the one given, a warm start's, or None for the base model."""
    if config.checkpoint:
        return await asyncio.to_thread(given_checkpoint, config.checkpoint)
    if config.warm_start_steps:
        warm = await warm_start(config, dataset, say=say)
        if (metrics := warm.folder / "metrics.jsonl").exists():
            await asyncio.to_thread(shutil.copyfile, metrics, config.folder / WARM_START_FILE)
        await asyncio.to_thread(try_to_report, config.folder)
        return warm.state_path
    return None


async def _evaluation(
    config: RunConfig, dataset: AgentEnvDatasetBuilder, *, checkpoint: str | None, label: str, step: int
) -> Evaluation:
    if (made := config.folder / "evaluations" / f"{label}.json").exists():  # before the run was interrupted
        return await asyncio.to_thread(Evaluation.read, made)
    return await evaluate(
        dataset,
        checkpoint=checkpoint,
        label=label,
        step=step,
        folder=config.folder / "evaluations",
        max_tokens=config.max_tokens,
        pass_threshold=config.pass_threshold,
        thresholds=config.above,
    )


async def _trained(
    config: RunConfig, dataset: AgentEnvDatasetBuilder, start: str | None, base: Evaluation | None, say: Say
) -> Trained:
    say(f"training: {config.steps} steps of {config.groups_per_batch} x {config.group_size} rollouts")
    recorded_by_now = functools.partial(
        recorded_evaluations,
        config.folder,
        dataset,
        start=start,
        pass_threshold=config.pass_threshold,
        thresholds=config.above,
    )
    async with reported(config.folder, before=recorded_by_now):
        for part in _parts(config, _cookbook_config(config, dataset, start)):
            async with rollout_executor(
                config.rollout_workers, config.ray, hosts=config.sandbox_hosts, log=config.folder / "console.log"
            ) as executor:
                await rl_train.main(part, rollout_executor=executor)
    _check_steps(config)
    recorded = await asyncio.to_thread(recorded_by_now)
    before = next((each for each in recorded if each.step == 0), None)
    if before is None:
        raise TrainingError(f"every episode of the evaluation before training failed; see {config.folder}/logs.log")
    checkpoint = checkpoint_utils.get_last_checkpoint(str(config.folder), "sampler_path")
    if checkpoint is None or checkpoint.sampler_path is None or checkpoint.state_path is None:
        raise TrainingError(f"the cookbook left no final checkpoint in {config.folder}")
    say("evaluating the final checkpoint")
    with boundary(TrainingError, "the final evaluation stopped", ConfigError):  # the service lost it, or went away
        after = await _evaluation(config, dataset, checkpoint=checkpoint.sampler_path, label="final", step=config.steps)
    say(f"final evaluation: {after.line}")
    adapter = await _downloaded(checkpoint.state_path, config.folder / "checkpoints" / "final", say)
    trained = Trained(base, before, after, config.folder, checkpoint.sampler_path, adapter)
    _write_summary(trained)
    return trained


def _parts(config: RunConfig, whole: rl_train.Config) -> list[rl_train.Config]:
    """What is left of the run; in two, where the evaluation before the next step was made before.

    The cookbook would make it again, unless that step is made with evaluations off.
    """
    step = next_step(config.folder)
    if step >= config.steps or not evaluated(config.folder, step):
        return [whole]
    dataset = chz.replace(whole.dataset_builder, max_steps=None)  # the second part starts its own episodes
    return [chz.replace(whole, max_steps=step + 1, eval_every=0, dataset_builder=dataset), whole]


def _write_summary(trained: Trained) -> None:
    summary = {
        "base": trained.base.to_dict() if trained.base is not None else None,
        "before": trained.before.to_dict(),
        "after": trained.after.to_dict(),
        "folder": str(trained.folder),
        "checkpoint": trained.checkpoint,
        "adapter": str(trained.adapter) if trained.adapter is not None else None,
    }
    (trained.folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")


async def _downloaded(state_path: str, folder: Path, say: Say) -> Path | None:
    """The weights at `state_path` as an adapter in `folder`. They are trained, so a failure here is only told."""
    download = functools.partial(weights.download, tinker_path=state_path, output_dir=str(folder))
    downloading = asyncio.create_task(asyncio.to_thread(download))
    try:
        await asyncio.shield(downloading)
    except asyncio.CancelledError:
        await asyncio.gather(downloading, return_exceptions=True)  # as long as the thread calls the SDK
        raise
    except TinkerCookbookError as error:
        say(f"the adapter was not downloaded: {described(error)}")
        return None
    return folder


def _cookbook_config(config: RunConfig, dataset: AgentEnvDatasetBuilder, start: str | None) -> rl_train.Config:
    return rl_train.Config(
        load_checkpoint_path=start,
        learning_rate=config.learning_rate,
        dataset_builder=dataset,
        model_name=config.model,
        renderer_name=dataset.renderer_name,
        recipe_name="agentenv-tinker",
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        lora_rank=config.lora_rank,
        log_path=str(config.folder),
        max_steps=config.steps,
        eval_every=config.eval_every or config.steps,  # the latter is before the first step alone
        save_every=0,
        rolling_save_every=config.save_every,
        rolling_ttl_seconds=_STATE_SECONDS,
        ttl_seconds=None,
        rollout_error_tolerance=True,
        wandb_project=config.wandb_project or None,
        wandb_name=config.run if config.wandb_project else None,
    )


def _check_steps(config: RunConfig) -> None:
    """A step whose every group failed is skipped by the cookbook with a warning; a run of nothing else is none."""
    trained = len(list(config.folder.glob("iteration_*/train_rollout_summaries.jsonl")))
    if trained == 0:
        log = config.folder / "logs.log"
        raise TrainingError(f"not one of {config.steps} steps was trained: every group failed; see {log}")
