"""The cookbook's own training loops over a bundle: in step, streamed, off policy, resumed and in worker processes."""

import json
import logging
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import tinker
from stand_in import service
from stand_in.bundles import task, write_bundle
from stand_in.model import MODEL, RENDERER, register
from stand_in.play import builder, runs_of
from tinker_cookbook.rl import train

TASKS = {f"write-{n}": task(f"Write {n}.") for n in range(6)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    evals = {"train": ["write-0", "write-1", "write-2", "write-3"], "held": ["write-4", "write-5"]}
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b", TASKS, evals=evals)


@pytest.fixture(autouse=True)
def stand_in_service(monkeypatch):
    """The service is the one thing that isn't there. The cookbook also takes over the process's logging."""
    monkeypatch.setattr(tinker, "ServiceClient", service.ServiceClient)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


async def trained(bundle, folder, run_name, *, executor=None, **settings):
    """Train, and return the config."""
    dataset = builder(
        bundle,
        train_split="train",
        test_split="held",
        run_name=run_name,
        group_size=2,
        groups_per_batch=1,
        log_path=str(folder),
    )
    config = train.Config(
        learning_rate=1e-4,
        dataset_builder=dataset,
        model_name=MODEL,
        renderer_name=RENDERER,
        recipe_name="test",
        max_tokens=1000,
        log_path=str(folder),
        **{"max_steps": 2, "eval_every": 1, "save_every": 1, "rollout_error_tolerance": True, **settings},
    )
    await train.main(config, rollout_executor=executor)
    return config


def filed(run_name):
    """How many runs the index has under each group of the run, and their statuses."""
    runs = runs_of(run_name)
    groups = Counter(run.overrides["metadata"]["run_group_id"].removeprefix(f"{run_name}/") for run in runs)
    return dict(groups), {str(run.status) for run in runs}


def rewards(folder):
    """Each rollout's reward as the cookbook's own report has it, by file."""
    return {
        str(path.relative_to(folder)): sorted(
            round(json.loads(line)["total_reward"], 6) for line in path.read_text().splitlines()
        )
        for path in sorted(Path(folder).glob("iteration_*/*_rollout_summaries.jsonl"))
    }


async def test_in_step_each_step_and_the_evaluation_before_it_is_filed_under_its_number(bundle, tmp_path):
    """An eval group is made once, and played again at each evaluation under the step of then."""
    await trained(bundle, tmp_path, "sync")
    groups, statuses = filed("sync")
    groups.pop("eval/step-2", None)  # newer cookbooks evaluate after the last step too
    assert groups == {"train/step-0": 2, "train/step-1": 2, "eval/step-0": 2, "eval/step-1": 2}
    assert statuses == {"COMPLETED"}


async def test_a_resumed_run_goes_on_with_its_steps(bundle, tmp_path):
    """Its first evaluation is of the checkpoint that it resumed from, before any batch was asked for."""
    await trained(bundle, tmp_path, "first")
    await trained(bundle, tmp_path, "resumed", max_steps=3)
    groups, statuses = filed("resumed")
    groups.pop("eval/step-3", None)
    assert groups == {"train/step-2": 2, "eval/step-2": 2}
    assert statuses == {"COMPLETED"}


async def test_streamed_minibatches_are_filed_by_step(bundle, tmp_path):
    """The loop trains on groups as they come."""
    stream = train.StreamMinibatchConfig(groups_per_batch=1, num_minibatches=1)
    await trained(bundle, tmp_path, "stream", stream_minibatch_config=stream)
    groups, statuses = filed("stream")
    assert statuses == {"COMPLETED"}
    assert {name: count for name, count in groups.items() if name.startswith("train")} == {
        "train/step-0": 2,
        "train/step-1": 2,
    }


async def test_off_policy_training_plays_a_stale_group_afresh(bundle, tmp_path):
    """A group that is requeued makes new episodes, under the same step, and none is left behind."""
    off_policy = train.AsyncConfig(max_steps_off_policy=0, groups_per_batch=2)
    await trained(bundle, tmp_path, "async", async_config=off_policy, max_steps=3, eval_every=0)
    groups, statuses = filed("async")
    assert statuses == {"COMPLETED"}
    assert {name.split("/")[0] for name in groups} == {"train"}
    assert all(count % 2 == 0 for count in groups.values())


async def test_in_worker_processes_the_rewards_are_the_same(bundle, tmp_path):
    """By the cookbook's own executor: each worker prepares the bundle itself, and files what it plays."""
    await trained(bundle, tmp_path / "here", "here")
    workers = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"), initializer=register)
    await trained(bundle, tmp_path / "workers", "workers", executor=workers)
    there, here = rewards(tmp_path / "workers"), rewards(tmp_path / "here")
    assert there == here
    assert here["iteration_000000/eval_test_rollout_summaries.jsonl"] == [0.4, 0.5]
    assert filed("workers") == filed("here")
