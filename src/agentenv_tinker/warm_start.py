"""Warm start: supervised learning on a bundle's demonstrations, by the cookbook's own loop, before RL.

Its result is kept under the folder of the runs by what it was made of, so that it is made once, and an interrupted one
goes on: with the demonstrations that are replayed, and at the training step that comes next.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import chz
import tinker
from tinker_cookbook import checkpoint_utils
from tinker_cookbook.supervised import train as supervised_train
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder

from agentenv_tinker import framework
from agentenv_tinker.config import WarmStartConfig
from agentenv_tinker.dataset import AgentEnvDatasetBuilder
from agentenv_tinker.demonstrations import FILE_NAME, Demonstration, demonstration_line, read_demonstrations
from agentenv_tinker.errors import BundleError, ConfigError, TrainingError
from agentenv_tinker.progress import Say, told
from agentenv_tinker.replay import Example, Replayed, of_split, read_replayed, replay, write_replayed

SAVE_EVERY = 10  # steps between checkpoints; an interrupted warm start repeats fewer than that
_REPLAYED_FILE = "replayed.jsonl"
_EXAMPLES_FILE = "examples.jsonl"
_TOLD_EVERY = 50  # replayed demonstrations
_TOLD_FAILURES = 3


@dataclass(frozen=True)
class WarmStart:
    """What a warm start came to."""

    folder: Path
    state_path: str
    """The trained weights to train on from, as a `tinker://` path."""
    sampler_path: str
    """The same to sample from."""


def replay_folder(config: WarmStartConfig) -> Path:
    """Where the replayed demonstrations of `config` are kept: by the bundle's files, and how it is played. Blocks."""
    root = framework.bundle_folder(config.bundle)
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(f"{path.relative_to(root)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    played = ("model", "renderer", "reward", "max_turn_messages", "max_tokens", "max_trajectory_tokens")
    digest.update(_settings(config, played))
    return config.runs / ".warm-starts" / f"{root.resolve().name}-{digest.hexdigest()[:12]}"


def warm_start_folder(config: WarmStartConfig) -> Path:
    """Where the warm start of `config` is kept: beside those of other settings for learning. Blocks."""
    learned = ("train_split", "min_score", "warm_start_steps", "warm_start_batch", "warm_start_learning_rate")
    digest = hashlib.sha256(_settings(config, (*learned, "lora_rank", "seed")))
    if config.demonstrations and (own := demonstrations_file(config)).is_file():
        digest.update(own.read_bytes())
    return replay_folder(config) / digest.hexdigest()[:12]


def _settings(config: WarmStartConfig, names: Iterable[str]) -> bytes:
    return json.dumps([getattr(config, name) for name in names]).encode()


def demonstrations_file(config: WarmStartConfig) -> Path:
    """The file of demonstrations that `config` learns from."""
    return Path(config.demonstrations) if config.demonstrations else framework.bundle_folder(config.bundle) / FILE_NAME


async def warm_start(config: WarmStartConfig, dataset: AgentEnvDatasetBuilder, *, say: Say) -> WarmStart:
    """Warm-start the model of `config` on the training split of `dataset`, or find that it was done.

    Raises BundleError for demonstrations that can't be read, or of which none is good enough.
    """
    folder = await asyncio.to_thread(warm_start_folder, config)
    if (done := await _done(folder)) is not None:
        say(f"warm start: done before, in {folder}")
        return done
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    await asyncio.to_thread(_set_resume_point, folder)
    builder = await _examples(config, dataset, folder, say)
    say(f"warm start: {config.warm_start_steps} steps of {config.warm_start_batch} demonstrations")
    async with told(folder, steps=config.warm_start_steps, say=say, episodes=False):
        await supervised_train.main(_cookbook_config(config, dataset, builder, folder))
    if (done := await _done(folder)) is None:
        raise TrainingError(f"the cookbook left no final checkpoint in {folder}")
    return done


def given_checkpoint(given: str) -> str:
    """The training state that `given` names: itself, a `tinker://` path, or the last one of a run's folder. Blocks.

    Raises ConfigError where that folder has none.
    """
    if given.startswith("tinker://"):
        return given
    last = checkpoint_utils.get_last_checkpoint(given)
    if last is None or last.state_path is None:
        raise ConfigError(f"{given!r} is neither a tinker:// path nor a folder with a checkpoint of a run")
    return str(last.state_path)


async def _done(folder: Path) -> WarmStart | None:
    """The warm start in `folder`, if it is complete and the service has its weights yet."""
    last = checkpoint_utils.get_last_checkpoint(str(folder))
    if last is None or last.state_path is None:
        return None
    if not await _has(last.state_path):
        for name in ("checkpoints.jsonl", "metrics.jsonl"):  # of another service, or removed there
            (folder / name).unlink(missing_ok=True)
        return None
    if last.name != "final" or last.sampler_path is None:
        return None
    return WarmStart(folder, last.state_path, last.sampler_path)


async def _has(path: str) -> bool:
    """Whether the service has the checkpoint at `path`."""
    rest = tinker.ServiceClient().create_rest_client()
    try:
        await rest.get_weights_info_by_tinker_path(path)
    except (tinker.NotFoundError, tinker.BadRequestError, tinker.PermissionDeniedError):
        return False
    return True


def _set_resume_point(folder: Path) -> None:
    """Have an interrupted loop go on after the batch of its last checkpoint.

    The loop files a checkpoint under the batch that it has just trained on, and would start again with that one.
    """
    last = checkpoint_utils.get_last_checkpoint(str(folder))
    if last is None or last.batch is None or last.extra.get("resumes_after") is not None:
        return
    record = {**last.to_dict(), "batch": last.batch + 1, "resumes_after": last.batch}
    with (folder / "checkpoints.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


async def _examples(
    config: WarmStartConfig, dataset: AgentEnvDatasetBuilder, folder: Path, say: Say
) -> DemonstrationDatasetBuilder:
    """The demonstrations that score well enough, replayed now or by an earlier try."""
    demonstrations = await asyncio.to_thread(read_demonstrations, demonstrations_file(config))
    needed = _as_many_as_needed(config, await of_split(demonstrations, dataset, dataset.train_split))
    replayed = await _replayed(needed, dataset, folder.parent / _REPLAYED_FILE, say)
    good = [one for one in replayed if one.reward is not None and one.reward >= config.min_score]
    say(f"demonstrations: {len(good)} of {len(replayed)} score {config.min_score:g} or more")
    for one in [one for one in replayed if one.reward is None][:_TOLD_FAILURES]:
        say(f"a demonstration of {one.task} failed: {one.error}")
    if not good:
        raise BundleError(_none_is_good(replayed, config.min_score))
    await asyncio.to_thread(write_replayed, folder / _EXAMPLES_FILE, good, mode="w")
    return DemonstrationDatasetBuilder(
        path=str(folder / _EXAMPLES_FILE), batch_size=config.warm_start_batch, seed=config.seed
    )


async def _replayed(
    demonstrations: list[Demonstration], dataset: AgentEnvDatasetBuilder, kept: Path, say: Say
) -> list[Replayed]:
    """`demonstrations` as they were replayed: before, as the file `kept` has it, or now, which it is to have."""
    known = {one.line: one for one in await asyncio.to_thread(read_replayed, kept)}
    missing = [one for one in demonstrations if demonstration_line(one) not in known]
    await asyncio.to_thread(write_replayed, kept, known.values(), mode="w")  # whole lines alone, to add to

    def keep(one: Replayed) -> None:
        known[one.line] = one
        if one.reward is not None:
            write_replayed(kept, [one])  # a line: too little to leave the event loop for
        if (over := sum(demonstration_line(each) in known for each in missing)) % _TOLD_EVERY == 0:
            say(f"demonstrations: {over} of {len(missing)} replayed")

    await replay(missing, dataset, dataset.train_split, on_replayed=keep)
    return [known[demonstration_line(one)] for one in demonstrations]


def _as_many_as_needed(config: WarmStartConfig, demonstrations: list[Demonstration]) -> list[Demonstration]:
    """A sample of the demonstrations, by the seed, where the steps take in fewer than there are."""
    needed = config.warm_start_steps * config.warm_start_batch
    return random.Random(config.seed).sample(demonstrations, min(needed, len(demonstrations)))


def _none_is_good(replayed: list[Replayed], min_score: float) -> str:
    failed = [one for one in replayed if one.reward is None]
    if len(failed) == len(replayed):
        return f"each of {len(failed)} demonstrations failed; that of {failed[0].task}: {failed[0].error}"
    best = max(one.reward for one in replayed if one.reward is not None)
    return f"no demonstration scores {min_score:g} or more; the best scores {best:g}"


class DemonstrationDataset(SupervisedDataset):
    """Batches of examples, shuffled anew in each epoch by the seed. The last batch of an epoch holds what is left."""

    def __init__(self, examples: list[Example], *, batch_size: int, seed: int) -> None:
        self._examples = examples
        self._batch_size = batch_size
        self._seed = seed
        self.set_epoch(0)

    def __len__(self) -> int:
        return math.ceil(len(self._examples) / self._batch_size)

    def set_epoch(self, seed: int = 0) -> None:
        """Shuffle for epoch number `seed`."""
        self._order = list(range(len(self._examples)))
        random.Random(f"{self._seed}/{seed}").shuffle(self._order)

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """The examples of batch `index`, for the loss `cross_entropy`."""
        chosen = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        return [self._examples[each].datum() for each in chosen]


@chz.chz
class DemonstrationDatasetBuilder(SupervisedDatasetBuilder):
    """Builds the dataset of the replayed demonstrations in a file."""

    path: str
    batch_size: int
    seed: int = 0

    def __call__(self) -> tuple[SupervisedDataset, None]:
        """The dataset, and no test set. Blocks."""
        examples = [example for one in read_replayed(Path(self.path)) for example in one.examples]
        return DemonstrationDataset(examples, batch_size=self.batch_size, seed=self.seed), None


def _cookbook_config(
    config: WarmStartConfig, dataset: AgentEnvDatasetBuilder, builder: DemonstrationDatasetBuilder, folder: Path
) -> supervised_train.Config:
    batches = len(builder()[0])
    return supervised_train.Config(
        log_path=str(folder),
        model_name=config.model,
        recipe_name="agentenv-tinker",
        renderer_name=dataset.renderer_name,
        dataset_builder=builder,
        learning_rate=config.warm_start_learning_rate,
        num_epochs=math.ceil(config.warm_start_steps / batches),
        max_steps=config.warm_start_steps,
        lora_rank=config.lora_rank,
        save_every=SAVE_EVERY,
        submit_ahead=0,  # so that a checkpoint holds the steps up to its batch, and none more
        ttl_seconds=None,
    )
