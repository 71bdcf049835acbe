"""The seams of the cookbook's generic tool env, here with the same meaning: both play the same scripted model.

What ours does more is taken off before they are compared: the score of a cut, and the metrics of an episode.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from stand_in.bundles import task, write_bundle
from stand_in.model import BAD_CALL, MODEL, RENDERER, Script, Truncated, Unended, call
from stand_in.play import Played, play
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.message_env import EnvFromMessageEnv
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits, TerminationRewardPolicy
from tinker_cookbook.rl.rollout_runner import RolloutHooks, run_rollout
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import AgentToolMessageEnv, ToolResult, simple_tool_result, tool

from agentenv_tinker.errors import EpisodeTimeoutError

SCORE = 0.5
OUR_METRICS = ("messages", "tool_calls", "tool_errors", "cut")
OUR_LOGS = ("prompt", "next_prompt", "unparsed", "task", "task_id", "run", "parse_error_retry")
"""The last both have, each in its own words."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b", {"desk": task("Go on.", preset=SCORE)})


class Desk:
    """The desk's tools, as the generic env has them."""

    def __init__(self) -> None:
        self._notes: list[str] = []

    @tool
    async def note(self, text: str) -> ToolResult:
        """Write a note."""
        self._notes.append(text)
        return simple_tool_result(f"noted {text!r}", name="note")

    @tool
    async def read(self) -> ToolResult:
        """Read the notes."""
        return simple_tool_result("\n".join(self._notes) or "no notes", name="read")


class Inject(RolloutHooks):
    """Says something to the model before its second message."""

    async def on_turn_begin(self, state):
        return [{"role": "user", "content": "Hurry up."}] if state.turn_index == 1 else None


@dataclass(frozen=True)
class Case:
    """A model's replies under settings that both envs know, by the names that ours has for them."""

    replies: tuple[Any, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    runner: Mapping[str, Any] = field(default_factory=dict)


READ, NOTE = call("read"), call("note", text="x")
RETRY = ParseErrorPolicy(max_consecutive=1, penalty_per_error=0.25, terminal_reward=-0.75)
MASK = ParseErrorPolicy(max_consecutive=1, mask_error_turns=True, retry_message_template="Again: {details}")

CASES = {
    "a reply": Case(("done",)),
    "calls, then a reply": Case((READ + NOTE, READ, "done")),
    "calls in order": Case((READ + NOTE + READ, "done"), {"tool_execution": "sequential"}),
    "thinking": Case(("<think>hm</think>I read." + READ, "<think>so</think>done")),
    "the last message has calls": Case((READ, NOTE, READ), {"max_turn_messages": 2}),
    "the last message has none": Case((READ, "done"), {"max_turn_messages": 2}),
    "the last message can't be parsed": Case((READ, BAD_CALL), {"max_turn_messages": 2, "failed_parse_reward": -0.5}),
    "no call left": Case((READ, NOTE, "done"), {"max_tool_calls": 1}),
    "calls left for a part": Case((READ, NOTE + READ + NOTE, "done"), {"max_tool_calls": 2}),
    "as many calls as are left": Case((READ, NOTE + READ, "done"), {"max_tool_calls": 3}),
    "a tighter cap by the runner": Case(
        (READ, NOTE, READ, "done"), {"max_tool_calls": 3}, {"limits": RolloutLimits(max_tool_calls=1)}
    ),
    "a looser cap by the runner": Case(
        (READ, NOTE, READ, "done"), {"max_tool_calls": 1}, {"limits": RolloutLimits(max_tool_calls=3)}
    ),
    "the cap and the last message at once": Case((READ + NOTE,), {"max_tool_calls": 1, "max_turn_messages": 1}),
    "an unparsed call": Case((READ, BAD_CALL), {"failed_parse_reward": -0.5}),
    "an unparsed call beside a good one": Case((READ + BAD_CALL, "done"), {"failed_parse_reward": -0.5}),
    "an unparsed call, retried": Case((BAD_CALL, READ, BAD_CALL, "done"), {"parse_error_policy": RETRY}),
    "unparsed calls in a row": Case((READ, BAD_CALL, BAD_CALL), {"parse_error_policy": RETRY}),
    "unparsed calls, masked": Case((BAD_CALL, BAD_CALL), {"parse_error_policy": MASK}),
    "unparsed as the last message": Case((READ, BAD_CALL), {"parse_error_policy": RETRY, "max_turn_messages": 2}),
    "a policy by the runner": Case((BAD_CALL, "done"), {}, {"parse_errors": RETRY}),
    "broken framing": Case((READ, Unended("what")), {"failed_parse_reward": -0.5}),
    "broken framing under a policy": Case((READ, Unended("what")), {"parse_error_policy": MASK}),
    "a reply cut at the token limit": Case((READ, Truncated("I wa")), {"context_overflow_reward": -0.25}),
    "a cut reply, gone on from": Case(
        (READ, Truncated("I wa"), Truncated(READ), "done"), {"terminate_on_length": False}
    ),
    "a context overflow": Case(
        (READ, call("note", text="y" * 1900), "done"), {"max_trajectory_tokens": 6000, "context_overflow_reward": -0.25}
    ),
    "messages from outside": Case((READ, NOTE, "done"), {}, {"hooks": Inject()}),
    "a runner's budget": Case((READ, NOTE, "done"), {}, {"limits": RolloutLimits(max_turns=2)}),
}


def generic(prefix: list[Any], settings: Mapping[str, Any], *, reward_fn: Any = None) -> EnvFromMessageEnv:
    """The cookbook's own tool env, under settings of ours, in a conversation that starts with `prefix`."""

    async def half(history: list[Any]) -> tuple[float, dict[str, float]]:
        return SCORE, {}

    desk = Desk()
    renderer = get_renderer(RENDERER, get_tokenizer(MODEL), model_name=MODEL)
    both = ("failed_parse_reward", "parse_error_policy")
    own = ("max_tool_calls", "tool_execution", "termination_policy")
    around = ("max_trajectory_tokens", "context_overflow_reward", "terminate_on_length")
    message_env = AgentToolMessageEnv(
        tools=[desk.note, desk.read],
        initial_messages=prefix,
        max_turns=settings.get("max_turn_messages", 8),
        reward_fn=reward_fn or half,
        **{name: settings[name] for name in both + own if name in settings},
    )
    return EnvFromMessageEnv(
        renderer, message_env, **{name: settings[name] for name in both + around if name in settings}
    )


def story(trajectory: Any) -> list[dict[str, Any]]:
    """A rollout as both envs tell it: its steps, less the score of a cut and what only an episode has."""
    steps = []
    for step in trajectory.transitions:
        cut = step.metrics.get("cut", 0.0)
        metrics = {
            name: value for name, value in step.metrics.items() if name not in OUR_METRICS and "score/" not in name
        }
        logs = {name: text for name, text in step.logs.items() if name not in OUR_LOGS}
        if cut:
            logs.pop("assistant_content", None)  # the generic env says nothing of a message that it never saw
        steps.append({"reward": step.reward - cut * SCORE, "done": step.episode_done, "metrics": metrics, "logs": logs})
    return steps


def conversation(messages: list[Any]) -> list[tuple[str, Any, list[Any]]]:
    return [
        (message["role"], message["content"], [c.function for c in message.get("tool_calls") or []])
        for message in messages
    ]


async def both(bundle: str, case: Case) -> tuple[Played, Any, Any]:
    """Ours, and the generic env's trajectory and messages, on the same model."""
    ours = await play(bundle, Script(*case.replies), runner=case.runner, **case.settings)
    env = generic(ours.messages[:2], case.settings)
    theirs = await run_rollout(Script(*case.replies), env, **case.runner)
    return ours, theirs, env.message_env.history


@pytest.mark.parametrize("name", CASES)
async def test_both_envs_tell_the_same_story_of_the_same_model(bundle, name):
    """Rewards, ends, metrics, logs, stop reasons and conversations are equal."""
    ours, theirs, history = await both(bundle, CASES[name])
    assert story(ours.trajectory) == story(theirs)
    assert ours.trajectory.stop_reason == theirs.stop_reason
    assert conversation(ours.messages) == conversation(history)


async def test_an_unknown_tool_is_an_error_that_both_go_on_from(bundle):
    """Only the words of the error differ."""
    ours, theirs, history = await both(bundle, Case((call("nothing"), "done")))
    assert [message["role"] for message in ours.messages] == [message["role"] for message in history]
    assert [step.reward for step in ours.trajectory.transitions] == [step.reward for step in theirs.transitions]


async def test_the_graders_timeout_is_a_timeout_error_in_both(bundle):
    """So the cookbook's strategies treat both alike."""
    assert issubclass(EpisodeTimeoutError, TimeoutError)
    policy = TerminationRewardPolicy(grader_timeout_seconds=0.001)
    with pytest.raises(TimeoutError):
        await play(bundle, Script("done"), termination_policy=policy, max_turn_messages=1)
