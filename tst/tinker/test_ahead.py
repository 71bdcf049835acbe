"""Episodes that start before their group asks: while slots are free, in nobody's way, and gone where they go unused."""

import asyncio

import pytest
from stand_in.bundles import failing_config, task, write_bundle
from stand_in.model import Script, call
from stand_in.play import builder, recorded, runs_of
from tinker_cookbook.rl.rollouts import do_group_rollout

from agentenv_tinker import episode, framework
from agentenv_tinker.episode import abandon_all, episodes_played
from agentenv_tinker.errors import EpisodeFailedError

TASKS = {
    "one": task("Go on.", preset=0.1),
    "two": task("Go on.", preset=0.2),
    "three": task("Go on.", preset=0.3),
    "fails": task("Go on.", setup=[failing_config("setup")]),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    evals = {"plays": ["one", "two", "three"], "then-fails": ["one", "fails"], "held": ["three"]}
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b", TASKS, evals=evals)


def settled(batches):
    """The rewards of groups, by task, in any order."""
    return sorted(tuple(round(reward, 9) for reward in group.get_total_rewards()) for group in batches)


async def until(true):
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - sandboxes tell nobody
            await asyncio.sleep(0.01)


async def first_batch(bundle, **settings):
    """The dataset of one group a batch, whose first batch was played and whose second is up, and the test dataset."""
    defaults = {"train_split": "plays", "group_size": 2, "max_concurrent_episodes": 2, "seed": 1, "max_steps": 3}
    train, test = await builder(bundle, **{**defaults, **settings})()
    [group] = train.get_batch(0)
    await do_group_rollout(group, Script(call("read"), "done"))
    return train, test


async def test_the_next_batch_is_at_its_first_turn_before_it_is_asked_for(bundle, sandboxes):
    """Its group plays in the sandboxes that were up, for the right rewards, and is filed under its own step."""
    train, _ = await first_batch(bundle, run_name="ahead")
    await until(lambda: len(sandboxes) == 2)
    up = set(sandboxes)
    [group] = train.get_batch(1)
    envs = await group.make_envs()
    await asyncio.gather(*(env.initial_observation() for env in envs))
    used = {each for env in envs for each in framework.sandbox_ids(env.episode.run._episode)}
    groups = [recorded(env).overrides["metadata"]["run_group_id"] for env in envs]
    await group.cleanup()
    assert used == up
    assert groups == ["ahead/train/step-1"] * 2
    await abandon_all("the test is over", seconds=60)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_every_batch_scores_the_same_however_few_the_slots_are(bundle, sandboxes, size):
    """Groups that exceed the slots, or leave some free, all finish; no more are ever up than there are slots."""
    peak = 0

    async def look(said):
        nonlocal peak
        peak = max(peak, len(sandboxes))

    train, _ = await builder(bundle, train_split="plays", group_size=3, max_concurrent_episodes=size, max_steps=3)()
    script = Script(call("read"), "done", before=look)
    async with asyncio.timeout(120):
        played = [await do_group_rollout(*train.get_batch(index), script) for index in range(3)]
    assert settled(played) == [(0.1,) * 3, (0.2,) * 3, (0.3,) * 3]
    assert peak <= size


async def test_an_evaluation_in_between_gets_the_slots(bundle, sandboxes):
    """What holds them unused gives way, and the batch plays later all the same."""
    train, test = await first_batch(bundle, test_split="held", eval_group_size=2)
    await until(lambda: len(sandboxes) == 2)
    script = Script(call("read"), "done")
    async with asyncio.timeout(60):
        evaluated = await do_group_rollout(*test.get_batch(0), script)
        played = [await do_group_rollout(*train.get_batch(index), script) for index in (1, 2)]
    assert evaluated.get_total_rewards() == pytest.approx([0.3, 0.3])
    assert len(settled(played)) == 2


async def test_what_is_never_used_leaves_nothing_and_is_not_counted(bundle, sandboxes):
    """No sandbox, no slot, no entry in the run index."""
    before, _ = episodes_played()
    await first_batch(bundle, run_name="unused")
    await until(lambda: len(sandboxes) == 2)
    assert episodes_played() == (before + 2, 0)
    assert await abandon_all("the test is over", seconds=60) == 0
    assert sandboxes == {}
    assert episodes_played() == (before + 2, 0)
    assert {run.overrides["metadata"]["run_group_id"] for run in runs_of("unused")} == {"unused/train/step-0"}


async def test_nothing_starts_ahead_of_the_trainers_last_step(bundle, sandboxes):
    """Nor at all where that is not known."""
    for steps in (1, None):
        train, _ = await first_batch(bundle, max_steps=steps)
        assert train._upcoming is None
        assert sandboxes == {}


async def test_a_batch_that_is_passed_over_gives_its_sandboxes_back(bundle, sandboxes):
    """As where a trainer goes on somewhere else."""
    train, _ = await first_batch(bundle)
    await until(lambda: len(sandboxes) == 2)
    train.get_batch(0)
    await until(lambda: sandboxes == {})


async def test_an_env_that_dies_meanwhile_is_replaced(bundle, sandboxes):
    """The group plays in a new one."""
    train, _ = await first_batch(bundle)
    await until(lambda: len(sandboxes) == 2)
    await until(lambda: all(run._early.done() for run in train._upcoming.groups[0]._early))
    next(iter(sandboxes.values())).die()
    played = await do_group_rollout(*train.get_batch(1), Script(call("read"), "done"))
    assert len(set(played.get_total_rewards())) == 1
    await abandon_all("the test is over", seconds=60)


async def test_what_waits_too_long_is_given_up(bundle, sandboxes, monkeypatch):
    """Its slots are free, and the group starts anew."""
    monkeypatch.setattr(episode, "AHEAD_SECONDS", 0.3)
    train, _ = await first_batch(bundle)
    await until(lambda: len(sandboxes) == 2)
    await until(lambda: sandboxes == {})
    async with asyncio.timeout(60):
        played = await do_group_rollout(*train.get_batch(1), Script(call("read"), "done"))
    assert len(played.get_total_rewards()) == 2
    await abandon_all("the test is over", seconds=60)


async def test_a_start_that_fails_ahead_fails_its_group_as_any_would(bundle, sandboxes):
    """The failure is found when the group is played."""
    train, _ = await builder(bundle, train_split="then-fails", group_size=2, max_concurrent_episodes=2, max_steps=2)()
    failed = 0
    for index in range(2):
        try:
            await do_group_rollout(*train.get_batch(index), Script(call("read"), "done"))
        except EpisodeFailedError:
            failed += 1
    assert failed == 1
    await abandon_all("the test is over", seconds=60)
