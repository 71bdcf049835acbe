"""How a rollout ends: on its own, at a limit, or cut, and that each cut is scored at once and gives its slot back."""

import asyncio

import pytest
from stand_in.bundles import failing_config, task, write_bundle
from stand_in.model import NO_TOOLS_RENDERER, Script, Truncated, Unended, call
from stand_in.play import builder, group, play, recorded
from stand_in.sandbox import LIFETIMES
from tinker_cookbook.rl.rollout_limits import RolloutLimits, TerminationRewardPolicy
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout, do_single_rollout

from agentenv_tinker import slots
from agentenv_tinker.episode import Deadlines
from agentenv_tinker.errors import ConfigError, EpisodeFailedError, EpisodeTimeoutError

TASKS = {
    "half": task("Go on.", preset=0.5),
    "turns": task("First.", "Second.", "Third.", preset=0.5),
    "fails": task("Go on.", setup=[failing_config("setup")]),
    "slow-verifier": task("Go on.", preset=-3),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    evals = {f"only-{name}": [name] for name in TASKS}
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b", TASKS, evals=evals)


async def slow_after_one(said):
    """Let a model write its first message at once, and its second for longer than it has."""
    if said == 1:
        await asyncio.sleep(3)


CUTS = {
    "token limit": (Script(call("read"), Truncated("I was sa")), {"context_overflow_reward": -0.1}, 0.4, "max_tokens"),
    "token limit at once": (
        Script(Truncated("I wa")),
        {"context_overflow_reward": -0.1},
        0.4,
        "max_tokens",
    ),
    "context overflow": (
        Script(call("long", length=3000)),
        {"max_trajectory_tokens": 6000, "context_overflow_reward": -0.2},
        0.3,
        "context_overflow",
    ),
    "broken framing": (Script(call("read"), Unended("what")), {"failed_parse_reward": -0.3}, 0.2, "parse_error"),
    "first prompt over the budget": (
        Script("never asked"),
        {"max_trajectory_tokens": 50, "context_overflow_reward": -0.1},
        0.4,
        "max_tokens",
    ),
    "rollout timeout": (Script(call("read"), before=slow_after_one), {"rollout_seconds": 1.0}, 0.5, "rollout_timeout"),
    "the runner's budget": (
        Script(call("read")),
        {"rollout_limits": RolloutLimits(max_turns=2)},
        0.5,
        "max_turns",
    ),
}


def script_of(name):
    """A fresh copy of the cut's script: a script keeps what it was asked."""
    script = CUTS[name][0]
    return Script(*script.replies, before=script.before)


@pytest.mark.parametrize("name", CUTS)
async def test_a_cut_rollout_is_scored_where_it_got_to_on_top_of_the_cookbooks_own_reward(bundle, name):
    """Its run is complete, and `cut` says what its reward is of."""
    _, settings, reward, reason = CUTS[name]
    played = await play(bundle, script_of(name), train_split="only-half", **settings)
    assert played.reward == pytest.approx(reward)
    assert (played.metrics["cut"], played.metrics["score/score"]) == (1.0, 0.5)
    assert played.trajectory.stop_reason == reason
    assert played.metrics[f"stop/{reason}"] == 1.0
    assert played.record.status == "COMPLETED"


async def test_a_rollout_out_of_time_is_scored_while_the_model_still_writes(bundle, sandboxes):
    """The message that it was writing then brings the score."""
    scored = asyncio.Event()

    async def write_on(said):
        if said == 1:
            while sandboxes:  # noqa: ASYNC110 - the model writes on until the episode is over
                await asyncio.sleep(0.05)
            scored.set()

    played = await play(bundle, Script(call("read"), before=write_on), train_split="only-half", rollout_seconds=1.0)
    assert scored.is_set()
    assert (played.reward, played.metrics["cut"], played.trajectory.stop_reason) == (0.5, 1.0, "rollout_timeout")


async def test_a_rollout_that_ends_on_its_own_is_not_cut(bundle):
    """`cut` is 0 for it."""
    played = await play(bundle, Script("done"), train_split="only-half")
    assert played.metrics == {
        "score/score": 0.5,
        "messages": 1,
        "tool_calls": 0,
        "tool_errors": 0,
        "cut": 0.0,
        "stop/completed": 1.0,
    }


@pytest.mark.parametrize(
    "name", ["token limit at once", "first prompt over the budget", "rollout timeout", "the runner's budget"]
)
async def test_a_group_larger_than_the_slots_finishes_when_every_rollout_in_it_is_cut(bundle, sandboxes, name):
    """A cut rollout gives its slot to the next before its group is over."""
    _, settings, reward, _ = CUTS[name]
    one = await group(bundle, train_split="only-half", group_size=3, max_concurrent_episodes=1, **settings)
    async with asyncio.timeout(60):
        played = await do_group_rollout(one, script_of(name))
    assert played.get_total_rewards() == pytest.approx([reward] * 3)


async def test_the_slots_bound_the_episodes_of_all_groups_and_both_datasets(bundle, sandboxes):
    """No more are ever up at once."""
    peak = 0

    async def look(said):
        nonlocal peak
        peak = max(peak, len(sandboxes))

    settings = {"train_split": "only-half", "test_split": "only-turns", "group_size": 3, "eval_group_size": 3}
    train, test = await builder(bundle, max_concurrent_episodes=2, **settings)()
    script = Script(call("read"), "done", before=look)
    await asyncio.gather(*(do_group_rollout(one, script) for one in [*train.get_batch(0), *test.get_batch(0)]))
    assert peak == 2


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"train_split": "only-fails"}, EpisodeFailedError),
        ({"train_split": "only-half", "renderer_name": NO_TOOLS_RENDERER}, ConfigError),
        ({"train_split": "only-half", "deadlines": Deadlines(start=0.01)}, EpisodeTimeoutError),
    ],
    ids=["a setup step fails", "the renderer writes no tools", "it takes too long"],
)
async def test_an_episode_that_never_gets_to_its_first_message_gives_its_slot_back(bundle, sandboxes, settings, error):
    """The next one starts."""
    with pytest.raises(error):
        await play(bundle, Script("done"), max_concurrent_episodes=1, **settings)
    assert sandboxes == {}
    async with asyncio.timeout(60):
        played = await play(bundle, Script("done"), train_split="only-half", max_concurrent_episodes=1)
    assert played.reward == 0.5


async def test_few_episodes_start_at_once_and_one_that_is_cancelled_before_gives_its_slot_back(
    bundle, sandboxes, monkeypatch
):
    """It has a slot while it waits to start, and no env was ever up for it; who starts next has its place."""
    monkeypatch.setattr(slots, "_STARTS", 1)
    starting = slots.starts()
    await starting.acquire()
    settings = {"train_split": "only-half", "group_size": 2, "max_concurrent_episodes": 2}
    one = await group(bundle, **settings)
    envs = await one.make_envs()
    rollouts = [asyncio.create_task(do_single_rollout(Script("done"), env)) for env in envs]
    done, _ = await asyncio.wait(rollouts, timeout=1)
    assert (done, sandboxes) == (set(), {})

    for rollout in rollouts:
        rollout.cancel()
    assert [type(each) for each in await asyncio.gather(*rollouts, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * 2
    starting.release()
    async with asyncio.timeout(60):
        played = await do_group_rollout(await group(bundle, **settings), Script("done"))
    assert played.get_total_rewards() == [0.5, 0.5]


async def test_cancelling_a_rollout_in_a_call_abandons_its_episode_and_waits_for_its_teardown(bundle, sandboxes):
    """By the time the rollout is over, nothing of it is up, and its run is filed as cancelled."""
    one = await group(bundle, train_split="only-half")
    [env] = await one.make_envs()
    rollout = asyncio.create_task(do_single_rollout(Script(call("slow", seconds=60)), env))
    async with asyncio.timeout(30):
        while not any(sandbox.server.busy for sandbox in sandboxes.values()):  # noqa: ASYNC110 - set in its own thread
            await asyncio.sleep(0.05)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert sandboxes == {}
    assert recorded(env).status == "CANCELED"


async def test_rollouts_cancelled_as_the_model_writes_give_their_slots_to_their_retries(bundle, sandboxes):
    """A strategy's own timeout isn't known to the env, and its slot must not wait for the group's end."""
    hung = 0

    async def hang_twice(said):
        nonlocal hung
        if said == 1 and hung < 2:
            hung += 1
            await asyncio.sleep(3600)

    one = await group(bundle, train_split="only-half", group_size=2, max_concurrent_episodes=2)
    strategy = RetryOnFailure(max_retries=2, per_rollout_timeout=8)
    async with asyncio.timeout(60):
        played = await do_group_rollout(one, Script(call("read"), "done", before=hang_twice), strategy=strategy)
    assert played.get_total_rewards() == [0.5, 0.5]
    assert [error.error_type for error in played.rollout_errors] == ["TimeoutError", "TimeoutError"]


async def test_a_turn_ends_at_its_last_message_and_the_next_goes_on(bundle):
    """`max_turn_messages` counts a turn's messages, and a limit that ends the rollout is named as the cookbook does."""
    script = Script(
        call("note", text="1"), call("note", text="2"), "next", call("note", text="3"), call("note", text="4")
    )
    played = await play(bundle, script, train_split="only-turns", max_turn_messages=2)
    assert [message["role"] for message in played.messages[1:]] == [
        *("user", "assistant", "tool", "assistant", "tool"),
        *("user", "assistant"),
        *("user", "assistant", "tool", "assistant", "tool"),
    ]
    assert played.trajectory.stop_reason == "max_turns"
    assert (played.reward, played.metrics["cut"], played.metrics["max_turns"]) == (0.5, 0.0, 1.0)


async def test_a_rollout_ends_at_its_last_tool_call_with_what_it_may_still_run(bundle):
    """The tighter of two limits holds, and the calls past it are dropped."""
    script = Script(call("read"), call("note", text="1") + call("note", text="2"))
    limits = RolloutLimits(max_tool_calls=2)
    played = await play(bundle, script, runner={"limits": limits}, train_split="only-half", max_tool_calls=5)
    assert played.answers == ["no notes", "noted '1'"]
    assert (played.reward, played.metrics["tool_calls"], played.trajectory.stop_reason) == (0.5, 2, "max_tool_calls")


async def test_a_score_that_takes_longer_than_the_grader_may_is_a_timeout(bundle, sandboxes):
    """Nothing is trained on it."""
    policy = TerminationRewardPolicy(grader_timeout_seconds=1.0)
    with pytest.raises(EpisodeTimeoutError, match="more than 1 s to be scored"):
        await play(bundle, Script(Truncated("x")), train_split="only-slow-verifier", termination_policy=policy)
    assert sandboxes == {}


async def test_a_sandbox_outlives_the_longest_rollout_and_its_verifiers(bundle):
    """Its lifetime is that of every wait of an episode together."""
    LIFETIMES.clear()
    deadlines = Deadlines(start=100, call=10, end=1000)
    await play(bundle, Script("done"), train_split="only-half", rollout_seconds=5000, deadlines=deadlines)
    assert min(LIFETIMES) > 100 + 5000 + 10 + 1000
    await play(bundle, Script("done"), train_split="only-half")
    assert min(LIFETIMES) > 100 + 5000 + 10 + 1000
