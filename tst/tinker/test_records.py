"""What a rollout leaves: its report, and its entry in the framework's run index, each with how it really ended."""

import asyncio

import pytest
from stand_in.bundles import failing_config, task, verifier, write_bundle
from stand_in.model import Script, Truncated, call
from stand_in.play import group, play, recorded, runs_of
from tinker_cookbook.rl.rollouts import do_group_rollout, do_single_rollout

from agentenv_tinker.env import EpisodeEnv
from agentenv_tinker.errors import EpisodeFailedError

TASKS = {
    "fine": task("Go.", preset=0.5),
    "fails-at-once": task("Go.", setup=[failing_config("setup")]),
    "fails-softly": task("Go.", preset=0.5, last=[failing_config("late", fail_task_on_error=False)]),
    "fails-beside-the-turn": task("Go.", preset=-4, scores=(), last=[verifier("beside", depends_on=["agent"])]),
    "fails-after-the-turn": task("Go.", preset=-1),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    evals = {f"only-{name}": [name] for name in TASKS}
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b", TASKS, evals=evals)


async def test_a_report_has_the_message_each_call_and_each_answer_clipped(bundle):
    """The run's own record has them whole."""
    long = "x" * (EpisodeEnv.LOGGED_CHARS + 100)
    script = Script(f"I write.{call('note', text=long)}{call('read')}", "done")
    played = await play(bundle, script, train_split="only-fine", tool_execution="sequential")
    first, last = (step.logs for step in played.trajectory.transitions)
    written = f'note({{"text": "{long}"}})'
    cut = len(written) - EpisodeEnv.LOGGED_CHARS
    assert first == {
        "prompt": "Go.",
        "assistant_content": "I write.",
        "tool_call_0": f"{written[:2000]}\n[{cut} more characters cut]",
        "tool_result_0": f"noted '{long}'"[:2000] + "\n[108 more characters cut]",
        "tool_call_1": "read({})",
        "tool_result_1": f"{long[:2000]}\n[100 more characters cut]",
    }
    assert last["assistant_content"] == "done"
    assert ("note", {"output": f"noted '{long}'"}) in played.trajectory_record


async def test_a_reply_that_was_cut_is_in_the_report_and_in_the_record(bundle):
    """Though its calls never ran."""
    cut = f"I wa{call('note', text='x')}"
    played = await play(bundle, Script(Truncated(cut)), train_split="only-fine")
    assert played.trajectory.transitions[-1].logs["assistant_content"] == cut
    assert played.trajectory_record[0] == ("chat", {"content": [{"type": "text", "text": cut}]})


@pytest.mark.parametrize(
    ("split", "status", "error"),
    [
        ("only-fine", "COMPLETED", None),
        ("only-fails-at-once", "FAILED", "step 'setup' failed"),
        ("only-fails-softly", "FAILED", "late"),
        ("only-fails-after-the-turn", "FAILED", "the verifier broke"),
    ],
)
async def test_a_run_is_filed_with_how_it_ended(bundle, split, status, error):
    """Under its training step's run group."""
    name = f"filed-{split}"
    try:
        await play(bundle, Script("done"), train_split=split, run_name=name)
    except EpisodeFailedError:
        assert error is not None
    [run] = runs_of(name)
    assert (run.status, run.overrides["metadata"]["run_group_id"]) == (status, f"{name}/train/step-0")
    assert error is None or error in run.error


@pytest.mark.parametrize(
    ("split", "status", "error"),
    [
        ("only-fine", "CANCELED", "the group is over"),
        ("only-fails-beside-the-turn", "FAILED", "RuntimeError: the verifier broke"),
    ],
)
async def test_an_abandoned_run_is_filed_as_cancelled_unless_it_had_failed_by_itself(bundle, split, status, error):
    """What abandons it doesn't change how it ended."""
    one = await group(bundle, train_split=split)
    [env] = await one.make_envs()
    await env.initial_observation()
    await asyncio.sleep(2)  # in which a step beside the open turn fails, where one does
    await one.cleanup()
    assert (recorded(env).status, recorded(env).error) == (status, error)


async def test_a_group_that_is_played_again_makes_new_runs(bundle):
    """As the cookbook does with a stale one: nothing of the first time is left in it."""
    one = await group(bundle, train_split="only-fine", run_name="twice")
    first = await do_group_rollout(one, Script("done"))
    second = await do_group_rollout(one, Script("done"))
    assert first.get_total_rewards() == second.get_total_rewards() == [0.5]
    runs = runs_of("twice")
    assert len({run.run_id for run in runs}) == 2
    assert {str(run.status) for run in runs} == {"COMPLETED"}


async def test_a_group_that_is_cleaned_up_as_it_starts_leaves_nothing(bundle, sandboxes):
    """Not even an episode that was being started, or that waited for a slot."""
    one = await group(bundle, train_split="only-fine", group_size=3, max_concurrent_episodes=2, run_name="early")
    envs = await one.make_envs()
    rollouts = [asyncio.create_task(do_single_rollout(Script("done"), env)) for env in envs]
    await asyncio.sleep(0.01)
    await one.cleanup()
    results = await asyncio.gather(*rollouts, return_exceptions=True)
    assert all(isinstance(result, EpisodeFailedError) for result in results)
    assert sandboxes == {}
    assert "RUNNING" not in {str(run.status) for run in runs_of("early")}
