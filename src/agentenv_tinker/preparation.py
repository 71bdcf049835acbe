"""What a command has ready before it plays the first episode, and gives back after the last.

That is its folder, the framework's records in it, the bundle, the Tinker service and the renderer.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import platform
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib import metadata
from pathlib import Path

import chz
from tinker_cookbook import model_info
from tinker_cookbook.exceptions import TinkerCookbookError

from agentenv_tinker import framework
from agentenv_tinker.bundle import Playable
from agentenv_tinker.config import DEFAULT_MODEL, MeasureConfig, PlayConfig, WarmStartConfig
from agentenv_tinker.conversation import Tool, tool_prefix
from agentenv_tinker.dataset import AgentEnvDatasetBuilder
from agentenv_tinker.episode import abandon_all
from agentenv_tinker.errors import BundleError, ConfigError, boundary
from agentenv_tinker.progress import Say, quiet_console
from agentenv_tinker.recipe import FILE_NAME, write_recipe
from agentenv_tinker.sandboxes import check_docker
from agentenv_tinker.service import tinker_service

_VERSIONED = ("agentenv-tinker", "agentenv-framework", "tinker", "tinker-cookbook", "torch", "transformers", "peft")
_TEARDOWN_SECONDS = 20.0
_RENDERERS = {DEFAULT_MODEL: "qwen3_instruct"}  # for models that the cookbook recommends none for

Splits = Callable[[AgentEnvDatasetBuilder, Playable], AgentEnvDatasetBuilder]
"""Sets the splits that a command plays; raises BundleError for one that the bundle doesn't have."""
Check = Callable[[], Awaitable[object]]
"""Tries what a command needs of the service; raises ConfigError."""


async def _nothing() -> None:
    """What a command needs of the service that needs no more than the model."""


@contextlib.asynccontextmanager
async def prepared(
    config: PlayConfig, splits: Splits, *, say: Say, check: Check = _nothing, resumes: bool = False
) -> AsyncIterator[AgentEnvDatasetBuilder]:
    """The dataset that `config` and `splits` ask for, with a service that has its model and passes `check`, for the
    block.

    The folder is the config's own, and new unless the run `resumes`; it holds the settings, `run.json`, once everything
    is ready. Raises
    ConfigError, BundleError, SandboxError or ServiceError, leaving nothing behind. Whatever ends the block, every
    episode is torn down first.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(_known_folder(config) if resumes else _new_folder(config))
        stack.enter_context(quiet_console(folder / "console.log"))
        stack.enter_context(_records_in(folder))
        stack.enter_context(framework.routing())
        if (version := await asyncio.to_thread(check_host, config)) is not None:
            say(f"sandboxes: Docker {version}")
        dataset = dataset_of(config)
        dataset = splits(dataset, await asyncio.to_thread(dataset.playable))
        say(f"model: {config.model}")
        service = await stack.enter_async_context(tinker_service(config.model, folder=folder))
        dataset = chz.replace(dataset, tokenizer_path=service.tokenizer_path)
        await asyncio.to_thread(_check_renderer, dataset)
        await check()
        if not resumes:
            started_with = {**config.to_dict(), "versions": _versions()}
            (folder / "run.json").write_text(json.dumps(started_with, indent=2) + "\n")
            write_recipe(config, folder / FILE_NAME)
        stack.push_async_callback(_teardown, say)
        await stack.enter_async_context(service.answering())
        yield dataset


def _versions() -> dict[str, str]:
    """Of what decides how a run goes."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in _VERSIONED}}


@contextlib.contextmanager
def _new_folder(config: PlayConfig) -> Iterator[Path]:
    """The run's folder, made for it, and removed again where the run never gets as far as its settings."""
    folder = config.folder
    if folder.exists():
        raise ConfigError(f"run {config.run!r} exists already in {folder}; choose another name, or remove it")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    with boundary(ConfigError, f"the run's folder {str(folder)!r} can't be made", OSError):
        folder.mkdir(parents=True)
    try:
        with _held(folder):
            yield folder.resolve()
    finally:
        if not (folder / "run.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # a folder that another run uses by now
                for each in made[1:]:
                    each.rmdir()


@contextlib.contextmanager
def _known_folder(config: PlayConfig) -> Iterator[Path]:
    """The folder of a run that goes on."""
    with _held(config.folder):
        yield config.folder.resolve()


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Have `folder` to this process alone for the block, which ends with the process too, however that ends."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"the run in {str(folder)!r} is still under way in another process") from error
    finally:
        os.close(opened)


@contextlib.contextmanager
def _records_in(folder: Path) -> Iterator[None]:
    """Keep the framework's records in the run's folder, for this process and the workers it spawns."""
    known = os.environ.get("XDG_STATE_HOME")
    records = folder / "records"
    records.mkdir(exist_ok=True)
    (records / "config.toml").write_text("# For `agent-env up`, which asks for a file: the framework's defaults.\n")
    os.environ["XDG_STATE_HOME"] = str(records)
    try:
        yield
    finally:
        if known is None:
            del os.environ["XDG_STATE_HOME"]
        else:
            os.environ["XDG_STATE_HOME"] = known


def check_host(config: PlayConfig) -> str | None:
    """The version of the Docker daemon that the sandboxes of `config` need, or None where they need none.

    Blocks. Raises SandboxError where it isn't there.
    """
    if config.sandbox not in ("local", "pool"):
        return None
    return check_docker(episodes=config.max_concurrent_episodes)


def dataset_of(config: PlayConfig) -> AgentEnvDatasetBuilder:
    """The dataset that `config` asks for, its splits apart. Raises ConfigError where it names no usable renderer."""
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
    )


def _recommended_renderer(model: str) -> str:
    if model in _RENDERERS:
        return _RENDERERS[model]
    with boundary(ConfigError, f"no renderer is known for model {model!r}; name one with --renderer", Exception):
        return model_info.get_recommended_renderer_name(model)


def train_split(config: WarmStartConfig, bundle: Playable) -> str:
    """The split to train on."""
    return config.train_split or ("train" if "train" in bundle.splits else "all")


def eval_split(config: MeasureConfig, bundle: Playable, *, option: str) -> str:
    """The split to evaluate on. Raises BundleError, which names the `option` to choose one by."""
    split = config.eval_split or "held_out"
    if not config.eval_split and split not in bundle.splits:
        raise BundleError(f"the bundle has no eval 'held_out'; name a split with {option}: {', '.join(bundle.splits)}")
    return split


def held_out(
    config: MeasureConfig, dataset: AgentEnvDatasetBuilder, bundle: Playable, *, option: str
) -> AgentEnvDatasetBuilder:
    """`dataset` with the split to evaluate on, and as many tasks of it as `config` asks for.

    Raises BundleError, which names the `option` to choose a split by.
    """
    split = eval_split(config, bundle, option=option)
    held = len(bundle.split(split))
    return chz.replace(dataset, test_split=split, eval_tasks=min(config.eval_tasks or held, held))


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
