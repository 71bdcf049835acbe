"""An episode's reward: the framework's own rules, and nothing for a run that failed."""

import asyncio
import contextlib
import threading
from dataclasses import dataclass

import pytest
import uvicorn
from agent_env.openenv import build_app
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.mcp_client import MCPToolClient
from stand_in.bundles import failing_config, task, verifier, write_bundle
from stand_in.model import Script, Truncated, call
from stand_in.play import builder, group, play
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout

from agentenv_tinker.errors import BundleError, EpisodeFailedError

NAN, BREAKS = -2, -1  # what the desk's verifier makes of a score of these


@dataclass(frozen=True)
class Case:
    """What a model does in each turn of a task, before it ends the turn."""

    turns: tuple[tuple[tuple[str, dict], ...], ...]
    reward: float | None
    """None where the run fails."""


def note(text):
    return ("note", {"text": text})


ONE_SCORE = {
    "nothing": (task("Go."), Case(((),), 0.0)),
    "notes": (task("Go."), Case(((note("a"), note("b"), note("c")),), 0.3)),
    "a tool's error": (task("Go."), Case(((("refuse", {"why": "no"}), note("a")),), 0.1)),
    "below zero": (task("Go."), Case(((("grade", {"score": -0.5}),),), 0.0)),  # a step averages within 0 and 1
    "two turns": (
        task("Go.", {"prompt": "On.", "system_prompt": "Be brief."}),
        Case(((note("a"),), (note("b"),)), 0.2),
    ),
    "a failing setup step": (task("Go.", setup=[failing_config("setup")]), Case(((note("a"),),), None)),
    "a verifier that breaks": (task("Go.", preset=BREAKS), Case(((note("a"),),), None)),
}
TWO_SCORES = {
    "before and after": (
        task("Go.", "On.", between={1: [verifier("early")]}),
        Case(((note("a"),), (note("b"),)), None),
    )
}


def total(scores):
    """A reward function that a worker process can find again."""
    return sum(scores.values())


@pytest.fixture(scope="module")
def one_score(tmp_path_factory):
    tasks = {f"task-{i}": steps for i, (steps, _) in enumerate(ONE_SCORE.values())}
    return write_bundle(tmp_path_factory.mktemp("one") / "b", tasks, evals={f"only-{name}": [name] for name in tasks})


@pytest.fixture(scope="module")
def two_scores(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("two") / "b", {"task": TWO_SCORES["before and after"][0]})


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    tasks = {
        "soft-after-the-score": task("Go.", preset=1.0, last=[failing_config("late", fail_task_on_error=False)]),
        "soft-before-the-turn": task("Go.", preset=1.0, setup=[failing_config("early", fail_task_on_error=False)]),
        "nan": task("Go.", preset=NAN),
        "no-score": task("Go.", preset=BREAKS, scores=()),
        "soft-verifier": task("Go.", preset=BREAKS, scores=(), last=[verifier("score", fail_task_on_error=False)]),
    }
    return write_bundle(tmp_path_factory.mktemp("bad") / "b", tasks, evals={f"only-{name}": [name] for name in tasks})


@contextlib.contextmanager
def serving(app):
    """`app` on a free port of loopback: its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


async def openenv_reward(url, split, case):
    """What the framework's OpenEnv server pays for the case's actions."""
    async with MCPToolClient(base_url=url, message_timeout_s=120) as env:
        end = await env.reset(split=split, index=0)
        for turn in case.turns:
            if end.done:
                break
            for name, arguments in turn:
                await env.step(CallToolAction(tool_name=name, arguments=arguments))
            end = await env.step(CallToolAction(tool_name="end_turn", arguments={"response": "done"}))
        assert end.done
        return end.reward


async def our_reward(bundle, split, case, **settings):
    """What a rollout of the case's actions earns; None where it fails."""
    replies = [
        reply for turn in case.turns for reply in ([call(name, **arguments) for name, arguments in turn] + ["done"])
    ]
    try:
        played = await play(bundle, Script(*replies), train_split=split, **settings)
    except EpisodeFailedError:
        return None
    return played.reward


async def test_the_same_actions_earn_what_the_frameworks_openenv_server_pays(one_score):
    """Case by case, the failing ones included."""
    cases = [case for _, case in ONE_SCORE.values()]
    splits = [f"only-task-{i}" for i in range(len(cases))]
    played = list(zip(splits, cases, strict=True))
    app = await asyncio.to_thread(build_app, one_score, sandbox="in_process")
    with serving(app) as url:
        paid = await asyncio.gather(*(openenv_reward(url, split, case) for split, case in played))
    ours = await asyncio.gather(*(our_reward(one_score, split, case) for split, case in played))
    expected = {name: case.reward for name, (_, case) in ONE_SCORE.items()}
    assert dict(zip(ONE_SCORE, paid, strict=True)) == pytest.approx(expected)
    assert dict(zip(ONE_SCORE, ours, strict=True)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rule", "reward"), [("early", 0.1), ("score", 0.2), (total, 0.3)], ids=["early", "late", "sum"]
)
async def test_a_step_or_a_function_names_the_reward_of_a_task_with_several_scores(two_scores, rule, reward):
    """As the OpenEnv server's `reward=` does, and each score is a metric."""
    case = TWO_SCORES["before and after"][1]
    app = await asyncio.to_thread(build_app, two_scores, sandbox="in_process", reward=rule)
    with serving(app) as url:
        assert await openenv_reward(url, "all", case) == pytest.approx(reward)
    replies = [call("note", text="a"), "done", call("note", text="b"), "done"]
    played = await play(two_scores, Script(*replies), reward=rule)
    assert played.reward == pytest.approx(reward)
    assert {name: value for name, value in played.metrics.items() if name.startswith("score/")} == {
        "score/early": 0.1,
        "score/score": 0.2,
    }


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (None, "it records a score at each of 'early', 'score'; name the one that is its reward with reward=<step id>"),
        ("other", "it records no score at step 'other'; it records one at 'early', 'score'"),
    ],
)
async def test_a_dataset_whose_tasks_make_no_reward_is_refused_naming_the_steps_it_could_use(two_scores, rule, message):
    """Before anything is played."""
    with pytest.raises(BundleError, match=message):
        await builder(two_scores, reward=rule)()


@pytest.mark.parametrize(
    ("split", "why"),
    [
        ("soft-after-the-score", "a step failed without stopping the run: .*late"),
        ("soft-before-the-turn", "a step failed without stopping the run: .*early"),
        ("soft-verifier", "a step failed without stopping the run: .*the verifier broke"),
        ("nan", "the score at step 'score' is nan"),
    ],
)
@pytest.mark.parametrize("reply", ["done", Truncated("do")], ids=["ended", "cut"])
async def test_a_run_that_failed_earns_nothing_though_it_recorded_a_score(failing, sandboxes, split, why, reply):
    """The framework's own rule says that it failed, and its record does too."""
    with pytest.raises(EpisodeFailedError, match=why):
        await play(failing, Script(reply), train_split=f"only-{split}")
    assert sandboxes == {}


async def test_a_missing_score_is_no_zero(failing):
    """A reward function of scores that aren't there has nothing to make one of."""
    with pytest.raises(BundleError, match="it records no score"):
        await builder(failing, train_split="only-no-score")()


async def test_a_failed_rollout_is_retried_or_drops_its_group_and_never_trains_as_a_zero(failing, one_score, sandboxes):
    """Under the cookbook's own strategy, the rewards of a group are of rollouts that were scored."""
    one = await group(failing, train_split="only-nan", group_size=2)
    with pytest.raises(EpisodeFailedError):
        await do_group_rollout(one, Script("done"), strategy=RetryOnFailure(max_retries=1))
    assert sandboxes == {}

    killed = False

    async def kill_the_first(said):
        nonlocal killed
        if said == 1 and not killed:
            killed = True
            next(iter(sandboxes.values())).die()

    one = await group(one_score, train_split="only-task-1", group_size=2)
    script = Script(call("note", text="a"), call("note", text="b"), "done", before=kill_the_first)
    played = await do_group_rollout(one, script, strategy=RetryOnFailure(max_retries=1))
    assert played.get_total_rewards() == pytest.approx([0.2, 0.2])
    assert [error.error_type for error in played.rollout_errors] == ["EpisodeFailedError"]
