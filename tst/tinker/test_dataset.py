"""The dataset: which of a bundle's tasks it plays, in which order, and that its groups travel to other processes."""

import asyncio
import json
import logging
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import distribution

import pytest
from stand_in.bundles import helper_agent, task, write_bundle
from stand_in.play import builder, group

from agentenv_tinker.errors import BundleError, ConfigError

TWO_AGENTS = [
    *task("Go.", agent=helper_agent()),
    {"id": "agent-2", "type": "deploy_agent", "agent_name": "second", "env_ids": ["desk"], **helper_agent()},
    {"id": "ask", "type": "prompt_agent", "agent_name": "second", "prompt": "Help.", "depends_on": ["agent-2"]},
]
SKILLS = [{"name": "greet", "description": "How to greet.", "skill_md": "---\nname: greet\ndescription: d\n---\nhi"}]
RETRIED = [
    {**step, "retry_config": {"retry_from_step_id": "env-desk"}} if step["id"] == "env-desk" else step
    for step in task("Go.")
]


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    """A bundle of ten tasks, three of them held out."""
    tasks = {f"task-{i}": task(f"Go {i}.") for i in range(10)}
    evals = {"train": [f"task-{i}" for i in range(7)], "held": ["task-9", "task-7", "task-8"]}
    return write_bundle(tmp_path_factory.mktemp("ten") / "b", tasks, evals=evals)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A bundle of 200 tasks, some of which can't be played."""
    tasks = {f"good-{i:03}": task("Go.") for i in range(190)}
    tasks |= {f"retried-{i}": RETRIED for i in range(5)} | {
        f"skilled-{i}": task("Go.", agent={"skills": SKILLS}) for i in range(3)
    }
    tasks |= {"two-agents": TWO_AGENTS, "silent": task(agent=helper_agent())}
    evals = {"good": ["good-000", "retried-0", "good-001"], "none": ["retried-0", "silent"]}
    return write_bundle(tmp_path_factory.mktemp("mixed") / "b", tasks, evals=evals)


def indices(batches):
    return [[one.index for one in batch] for batch in batches]


async def test_batches_are_shuffled_by_the_seed_anew_each_epoch_and_the_last_holds_what_is_left(ten):
    """Every task comes once an epoch, and the order is the seed's alone."""
    settings = {"train_split": "train", "groups_per_batch": 4, "group_size": 3, "epochs": 2}
    train, test = await builder(ten, seed=7, **settings)()
    batches = [train.get_batch(i) for i in range(len(train))]
    assert [len(batch) for batch in batches] == [4, 4, 4, 2]
    order = [index for batch in indices(batches) for index in batch]
    assert sorted(order[:7]) == sorted(order[7:]) == list(range(7))
    assert order[:7] != order[7:]
    assert {one.size for batch in batches for one in batch} == {3}
    again, _ = await builder(ten, seed=7, **settings)()
    other, _ = await builder(ten, seed=8, **settings)()
    assert indices(again.get_batch(i) for i in range(4)) == indices(batches)
    assert indices(other.get_batch(i) for i in range(4)) != indices(batches)
    assert test is None
    with pytest.raises(IndexError, match="there is no batch 4; the dataset has 4"):
        train.get_batch(4)


async def test_a_trainer_that_goes_round_again_counts_its_steps_on(ten):
    """By the cookbook's `num_epochs` a batch is asked for again; its groups are of a later step."""
    train, test = await builder(ten, train_split="train", test_split="held", groups_per_batch=4)()
    [evaluated] = test.get_batch(0)[:1]
    steps = [train.get_batch(i % len(train))[0].step for i in range(5)]
    assert steps == [0, 1, 2, 3, 4]
    assert evaluated.step.value == 5
    assert train.get_batch(1)[0].step == 5
    assert train.get_batch(1)[0].step == 1  # out of turn, a batch is its own number


async def test_the_test_set_is_each_held_out_task_in_order_as_often_as_asked(ten):
    """The eval's own order, once each, or `eval_group_size` times, or the first few."""
    settings = {"train_split": "train", "test_split": "held", "groups_per_batch": 2}
    _, test = await builder(ten, **settings)()
    groups = [one for i in range(len(test)) for one in test.get_batch(i)]
    assert [(one.index, one.size, one.part, one.logging_tags()) for one in groups] == [
        (i, 1, "eval", ["eval"]) for i in range(3)
    ]
    held = (await asyncio.to_thread(builder(ten, **settings).playable)).split("held")
    assert [task.name for task in held] == ["task-9", "task-7", "task-8"]
    _, test = await builder(ten, **settings, eval_group_size=4, eval_tasks=1)()
    assert [(one.index, one.size) for one in test.get_batch(0)] == [(0, 4)]
    assert len(test) == 1


async def test_a_bundle_is_a_folder_or_a_mapping_of_split_to_bundle(ten, mixed):
    """Each bundle of a mapping is a split of every task it has."""
    both = {"first": ten, "second": mixed}
    bundle = await asyncio.to_thread(builder(both, train_split="first").playable)
    assert {name: len(tasks) for name, tasks in bundle.splits.items()} == {"first": 10, "second": 193}
    train, test = await builder(both, train_split="second", test_split="first", groups_per_batch=200)()
    assert (len(train.get_batch(0)), len(test.get_batch(0))) == (193, 10)


async def test_a_bundle_is_an_installed_bundles_name(ten, tmp_path, monkeypatch):
    """As `agent-env run NAME` finds it."""
    package = tmp_path / "shipped"
    package.mkdir()
    (package / "__init__.py").write_text("")
    write_bundle(package / "shipped", {"one": task("Go.")})
    info = tmp_path / "shipped-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shipped\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agent_env.bundles]\nshipped = shipped\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert distribution("shipped").version == "1.0"
    train, _ = await builder("shipped")()
    assert len(train.get_batch(0)) == 1


async def test_the_played_agent_need_not_exist(tmp_path):
    """The bundle is prepared without it."""
    bundle = write_bundle(tmp_path / "b", {"one": task("Go.", agent={"a2a_agent_id": "nobody-knows-it"})})
    train, _ = await builder(bundle)()
    assert len(train) == 1


async def test_tasks_that_cannot_be_played_are_left_out_with_their_reason_before_training(mixed, caplog):
    """Each is logged with why, and a line says how many were kept and left out, and why."""
    with caplog.at_level(logging.INFO, logger="agentenv_tinker.bundle"):
        train, _ = await builder(mixed, groups_per_batch=200, skills="leave_out", run_name="left-out")()
    assert len(train.get_batch(0)) == 190
    lines = [record.getMessage() for record in caplog.records if record.name == "agentenv_tinker.bundle"]
    reasons = {line.split("'")[1]: line.split(" is left out: ")[1] for line in lines if " is left out: " in line}
    retried, skilled = {f"retried-{i}" for i in range(5)}, {f"skilled-{i}" for i in range(3)}
    assert set(reasons) == retried | skilled | {"two-agents", "silent"}
    replayed = "it can't run as an episode: step 'env-desk': retry_config can replay an outside turn"
    assert {reasons[name] for name in retried} == {replayed}
    assert reasons["skilled-0"] == "it has skills (greet), and skills='leave_out'"
    assert reasons["two-agents"].startswith("it prompts ['default-agent', 'second']; name the ones to play")
    assert reasons["silent"] == "it prompts no agent"
    assert lines[-1].startswith(
        f"190 tasks can be played, 10 are left out: 5 because {replayed}; 3 because it has skills"
    )


async def test_tasks_with_skills_are_kept_unless_they_are_to_be_left_out(mixed):
    """By default they are shown to the model."""
    train, _ = await builder(mixed, groups_per_batch=200)()
    assert len(train.get_batch(0)) == 193


async def test_a_split_keeps_those_of_its_tasks_that_can_be_played(mixed):
    """An eval's order stays."""
    bundle = await asyncio.to_thread(builder(mixed, train_split="good").playable)
    assert [task.name for task in bundle.split("good")] == ["good-000", "good-001"]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("none", "split 'none' has no task that can be played\n  task"),
        ("nowhere", "there is no split 'nowhere'; the splits are 'all', 'good', 'none'"),
    ],
)
async def test_a_split_with_nothing_to_play_is_an_error(mixed, split, message):
    """It says why, or which splits there are."""
    with pytest.raises(BundleError, match=message):
        await builder(mixed, train_split=split)()


async def test_every_problem_of_a_bundle_is_named_with_its_file(tmp_path):
    """A bundle that can't be prepared is one error."""
    bundle = write_bundle(tmp_path / "b", {"one": task("Go."), "two": task("Go.")})
    for name in ("one", "two"):
        (tmp_path / "b" / "tasks" / f"{name}.json").write_text(json.dumps([{"id": "x", "type": "no_such_step"}]))
    with pytest.raises(BundleError) as error:
        await builder(bundle)()
    assert [name in str(error.value) for name in ("tasks/one.json", "tasks/two.json")] == [True, True]


@pytest.mark.parametrize(
    "setting",
    ["groups_per_batch", "group_size", "eval_group_size", "epochs", "max_concurrent_episodes", "max_turn_messages"],
)
def test_a_count_below_one_is_refused(setting):
    """Before a bundle is looked at."""
    with pytest.raises(ConfigError, match=f"{setting} must be 1 or more, not 0"):
        builder("anything", **{setting: 0})


async def test_a_group_builder_is_pickled_without_the_envs_it_made(ten):
    """And is none the worse for it."""
    one = await group(ten, group_size=2)
    made = await one.make_envs()
    copied = pickle.loads(pickle.dumps(one))
    assert len(pickle.dumps(one)) < 4000
    assert len(await copied.make_envs()) == len(made) == 2
    await one.cleanup()


def prepared_twice(pickled):
    """In a worker: the tasks of two groups of the same bundle, and whether they are of one preparation."""
    from stand_in.model import register

    register()
    first, second = (pickle.loads(one) for one in pickled)
    tasks = [one.settings.playable().split(one.split)[one.index] for one in (first, second, first)]
    return [task.name for task in tasks], tasks[0] is tasks[2]


async def test_a_worker_process_prepares_the_bundle_itself_once(ten):
    """It gets the same tasks by their places."""
    train, _ = await builder(ten, groups_per_batch=2)()
    groups = train.get_batch(0)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as workers:
        pickled = [pickle.dumps(one) for one in groups]
        names, once = await asyncio.get_running_loop().run_in_executor(workers, prepared_twice, pickled)
    assert names == [f"task-{one.index}" for one in (groups[0], groups[1], groups[0])]
    assert once
