"""Trains a model on a bundle: checks everything, evaluates, trains with the cookbook, and evaluates again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import chz
import tinker
from tinker_cookbook import checkpoint_utils, model_info, weights
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.utils.ml_log import JsonLogger

from agentenv_tinker import framework
from agentenv_tinker.config import DEFAULT_MODEL, RunConfig
from agentenv_tinker.conversation import Tool, tool_prefix
from agentenv_tinker.dataset import AgentEnvDatasetBuilder
from agentenv_tinker.episode import abandon_all
from agentenv_tinker.errors import BundleError, ConfigError, TrainingError, boundary, described
from agentenv_tinker.evaluation import Evaluation, read_evaluation
from agentenv_tinker.progress import Say, quiet_console, told
from agentenv_tinker.sandboxes import check_docker
from agentenv_tinker.service import tinker_service

_TEARDOWN_SECONDS = 20.0
_RENDERERS = {DEFAULT_MODEL: "qwen3_instruct"}  # for models that the cookbook recommends none for


@dataclass(frozen=True)
class Trained:
    """What a run came to, and where it is."""

    before: Evaluation
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
        folder = stack.enter_context(_new_folder(config))
        stack.enter_context(quiet_console(folder / "console.log"))
        stack.enter_context(_records_in(folder))
        stack.enter_context(framework.routing())
        dataset = await _prepared(config, say)
        say(f"model: {config.model}")
        service = await stack.enter_async_context(tinker_service(config.model, folder=folder))
        dataset = chz.replace(dataset, tokenizer_path=service.tokenizer_path)
        await asyncio.to_thread(_check_renderer, dataset)
        (folder / "run.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        stack.push_async_callback(_teardown, say)
        stack.enter_context(
            boundary(TrainingError, "training stopped", tinker.TinkerError, TinkerCookbookError, OSError)
        )
        await stack.enter_async_context(told(folder, steps=config.steps, say=say))
        return await _trained(config, dataset, say)


@contextlib.contextmanager
def _new_folder(config: RunConfig) -> Iterator[Path]:
    """The run's folder, made for it, and removed again where the run never gets as far as its settings."""
    folder = config.folder
    if folder.exists():
        raise ConfigError(f"run {config.run!r} exists already in {folder}; choose another name, or remove it")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    with boundary(ConfigError, f"the run's folder {str(folder)!r} can't be made", OSError):
        folder.mkdir(parents=True)
    try:
        yield folder.resolve()
    finally:
        if not (folder / "run.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # a folder that another run uses by now
                for each in made[1:]:
                    each.rmdir()


@contextlib.contextmanager
def _records_in(folder: Path) -> Iterator[None]:
    """Keep the framework's records in the run's folder, for this process and the workers it spawns."""
    known = os.environ.get("XDG_STATE_HOME")
    records = folder / "records"
    records.mkdir()
    (records / "config.toml").write_text("# For `agent-env up`, which asks for a file: the framework's defaults.\n")
    os.environ["XDG_STATE_HOME"] = str(records)
    try:
        yield
    finally:
        if known is None:
            del os.environ["XDG_STATE_HOME"]
        else:
            os.environ["XDG_STATE_HOME"] = known


async def _prepared(config: RunConfig, say: Say) -> AgentEnvDatasetBuilder:
    """The dataset of the bundle, which is prepared and has the splits that are asked for."""
    if config.sandbox in ("local", "pool"):
        say(f"sandboxes: Docker {await asyncio.to_thread(check_docker)}")
    dataset = _dataset(config)
    bundle = await asyncio.to_thread(dataset.playable)
    train_split = config.train_split or ("train" if "train" in bundle.splits else "all")
    eval_split = config.eval_split or "held_out"
    if not config.eval_split and eval_split not in bundle.splits:
        raise BundleError(
            f"the bundle has no eval 'held_out'; name a split with --eval-split: {', '.join(bundle.splits)}"
        )
    tasks, held = len(bundle.split(train_split)), len(bundle.split(eval_split))
    say(f"bundle: {config.bundle}, {tasks} tasks to train on ({train_split}), {held} held out ({eval_split})")
    return chz.replace(
        dataset,
        train_split=train_split,
        test_split=eval_split,
        epochs=math.ceil(config.steps * config.groups_per_batch / tasks),
        eval_tasks=min(config.eval_tasks or held, held),
    )


def _dataset(config: RunConfig) -> AgentEnvDatasetBuilder:
    return AgentEnvDatasetBuilder(
        bundle=str(config.bundle),
        run_name=config.run,
        model_name=config.model,
        renderer_name=config.renderer or _recommended_renderer(config.model),
        reward=config.reward or None,
        sandbox=config.sandbox,
        max_concurrent_episodes=config.max_concurrent_episodes,
        max_turn_messages=config.max_turn_messages,
        max_trajectory_tokens=config.max_trajectory_tokens,
        max_generation_tokens=config.max_tokens,
        log_path=str(config.folder),
        groups_per_batch=config.groups_per_batch,
        group_size=config.group_size,
        seed=config.seed,
    )


def _recommended_renderer(model: str) -> str:
    if model in _RENDERERS:
        return _RENDERERS[model]
    with boundary(ConfigError, f"no renderer is known for model {model!r}; name one with --renderer", Exception):
        return model_info.get_recommended_renderer_name(model)


def _check_renderer(dataset: AgentEnvDatasetBuilder) -> None:
    """Load the renderer, and see that it can write tools. Blocks. Raises ConfigError."""
    named = f"renderer {dataset.renderer_name!r} of model {dataset.model_name!r}"
    with boundary(ConfigError, f"{named} can't be used", OSError, ValueError, TinkerCookbookError):
        tool_prefix(dataset.renderer(), [Tool("probe", "", {"type": "object", "properties": {}})], None)


async def _teardown(say: Say) -> None:
    left = await abandon_all(
        "the run ended", seconds=_TEARDOWN_SECONDS, on_progress=lambda count: say(f"tearing down {count} episodes")
    )
    if left:
        left_up = "`docker ps --filter name=agent-local-` shows what is still up"
        say(f"{left} episodes were not torn down within {_TEARDOWN_SECONDS:g} s; {left_up}")


async def _trained(config: RunConfig, dataset: AgentEnvDatasetBuilder, say: Say) -> Trained:
    cookbook = _cookbook_config(config, dataset)
    planned = dataset.eval_tasks or 0
    say(f"training: {config.steps} steps of {config.groups_per_batch} x {config.group_size} rollouts")
    await rl_train.main(cookbook)
    before = read_evaluation(config.folder, 0, planned=planned)
    _check_steps(config)
    checkpoint = checkpoint_utils.get_last_checkpoint(str(config.folder), "sampler_path")
    if checkpoint is None or checkpoint.sampler_path is None or checkpoint.state_path is None:
        raise TrainingError(f"the cookbook left no final checkpoint in {config.folder}")
    say("evaluating the final checkpoint")
    await _evaluate(cookbook, dataset, checkpoint.sampler_path)
    after = read_evaluation(config.folder, config.steps, planned=planned)
    adapter = await _downloaded(checkpoint.state_path, config.folder / "checkpoints" / "final", say)
    trained = Trained(before, after, config.folder, checkpoint.sampler_path, adapter)
    (config.folder / "summary.json").write_text(json.dumps(asdict(trained), indent=2, default=str) + "\n")
    return trained


async def _downloaded(state_path: str, folder: Path, say: Say) -> Path | None:
    """The weights at `state_path` as an adapter in `folder`. They are trained, so a failure here is only told."""
    try:
        await asyncio.to_thread(weights.download, tinker_path=state_path, output_dir=str(folder))
    except TinkerCookbookError as error:
        say(f"the adapter was not downloaded: {described(error)}")
        return None
    return folder


def _cookbook_config(config: RunConfig, dataset: AgentEnvDatasetBuilder) -> rl_train.Config:
    return rl_train.Config(
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
        ttl_seconds=None,
        rollout_error_tolerance=True,
    )


def _check_steps(config: RunConfig) -> None:
    """A step whose every group failed is skipped by the cookbook with a warning; a run of nothing else is none."""
    trained = len(list(config.folder.glob("iteration_*/train_rollout_summaries.jsonl")))
    if trained == 0:
        log = config.folder / "logs.log"
        raise TrainingError(f"not one of {config.steps} steps was trained: every group failed; see {log}")


async def _evaluate(cookbook: rl_train.Config, dataset: AgentEnvDatasetBuilder, sampler_path: str) -> None:
    """Evaluate as the cookbook does between steps, once more after the last; it leaves its rollouts and metrics."""
    assert cookbook.max_steps is not None
    _, test = await dataset()
    if test is None:
        raise ConfigError("there is no eval split")
    service = tinker.ServiceClient()
    sampler = await service.create_sampling_client_async(model_path=sampler_path)
    evaluator = RLTestSetEvaluator(test, cookbook.max_tokens, strategy=cookbook.effective_rollout_strategy())
    logger = JsonLogger(cookbook.log_path)
    metrics = await rl_train.run_evaluations_parallel(
        [evaluator], sampler, cookbook, cookbook.max_steps, store=logger.store
    )
    logger.log_metrics(metrics, step=cookbook.max_steps)
    logger.close()
