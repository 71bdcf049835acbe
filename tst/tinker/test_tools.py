"""The model's calls: typed by their tool's schema, run as it asked, and answered by what the model can read."""

import re

import pytest
from stand_in.bundles import task, write_bundle
from stand_in.model import VISION_RENDERER, Script, call
from stand_in.play import play
from stand_in.servers import PIXEL

from agentenv_tinker.episode import Deadlines
from agentenv_tinker.errors import EpisodeFailedError


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b", {"desk": task("Go on.")})


async def test_a_message_is_recorded_before_its_calls_run_and_the_reply_ends_the_turn(bundle):
    """The run's record has the message, its calls and their answers in that order, thinking included."""
    script = Script(
        "<think>first</think>I write." + call("note", text="a", id="c1") + call("note", text="b"), "That's it."
    )
    played = await play(bundle, script, tool_execution="sequential")
    assert played.trajectory_record == [
        (
            "chat",
            {
                "content": [
                    {"type": "thinking", "thinking": "first"},
                    {"type": "text", "text": "I write."},
                    {"type": "tool_use", "id": "c1", "name": "note", "input": {"text": "a"}},
                    {"type": "tool_use", "id": "call_1", "name": "note", "input": {"text": "b"}},
                ]
            },
        ),
        ("note", {"output": "noted 'a'"}),
        ("note", {"output": "noted 'b'"}),
        ("chat", {"content": [{"type": "text", "text": "That's it."}]}),
        ("turn", {"content": [{"type": "text", "text": "That's it."}]}),
    ]


@pytest.mark.parametrize(
    ("tool_execution", "finished"),
    [("parallel", "fast\nslow"), ("sequential", "slow\nfast")],
    ids=["parallel", "in order"],
)
async def test_calls_run_as_asked_and_are_answered_in_the_order_they_were_made(bundle, tool_execution, finished):
    """Only the order in which they finish tells the two apart."""
    calls = call("slow", seconds=0.5, then="slow") + call("slow", seconds=0, then="fast")
    played = await play(bundle, Script(calls, call("read"), "done"), tool_execution=tool_execution)
    assert played.answers == ["slow", "fast", finished]


async def test_what_the_model_gets_wrong_is_an_error_that_it_reads_and_can_go_on_from(bundle):
    """An unknown tool, arguments that don't fit, a tool's own error and one that takes too long."""
    script = Script(
        call("nothing"),
        call("note"),
        call("note", text={"a": 1}),
        call("refuse", why="no"),
        call("slow", seconds=30),
        call("note", text="still here"),
        "done",
    )
    played = await play(bundle, script, deadlines=Deadlines(call=1.0))
    unknown, missing, typed, refused, late, noted = played.answers
    assert unknown.startswith("Error: there is no tool 'nothing'; the tools are crash, grade, long, note,")
    assert re.fullmatch(r"Error.*text.*required.*", missing, re.DOTALL)
    assert typed == """noted '{"a": 1}'"""
    assert re.fullmatch(r"Error.*no", refused)
    assert late == "error: the tool call timed out after 1s"
    assert noted == "noted 'still here'"
    assert (played.reward, played.metrics["tool_calls"], played.metrics["tool_errors"]) == (0.2, 6, 4)


async def test_arguments_arrive_as_the_tools_schema_types_them(bundle):
    """A renderer that reads "19122" as a number, or true as a word, doesn't change what the tool is called with."""
    written = {
        "code": 19122,
        "count": "3",
        "ratio": "0.5",
        "flag": "true",
        "maybe": 20,
        "either": "7",
        "mode": True,
        "level": "2",
        "tags": '["a", "b"]',
        "where": '{"x": "4", "label": 5}',
        "rows": {"r": ["1", 2.0]},
    }
    played = await play(bundle, Script(call("typed", **written), "done"))
    assert played.answers == [
        "{'code': '19122', 'count': 3, 'ratio': 0.5, 'flag': True, 'maybe': '20', 'either': '7', 'mode': 'true', "
        "'level': 2, 'tags': ['a', 'b'], 'where': {'x': 4, 'label': '5'}, 'rows': {'r': [1, 2]}}"
    ]


async def test_a_long_answer_is_clipped_with_a_note_of_how_much_was_cut(bundle):
    """The model reads `max_tool_chars` of it."""
    played = await play(bundle, Script(call("long", length=50), "done"), max_tool_chars=20)
    assert played.answers == ["x" * 20 + "\n[30 more characters cut]"]


async def test_an_image_is_a_placeholder_for_a_model_that_takes_none(bundle):
    """The model is told of what it isn't shown."""
    played = await play(bundle, Script(call("picture", caption="A pixel."), "done"))
    assert played.answers == ["A pixel.\n[image image/png: not shown to this model]"]


async def test_an_image_is_an_image_for_a_vision_model_unless_it_cannot_be_opened(bundle):
    """A broken one would stop the renderer, so it is a placeholder too."""
    calls = call("picture", caption="A pixel.") + call("picture") + call("picture", data="broken")
    played = await play(bundle, Script(calls, "done"), renderer_name=VISION_RENDERER)
    pixel = {"type": "image", "image": f"data:image/png;base64,{PIXEL}"}
    assert played.answers == [
        [{"type": "text", "text": "A pixel."}, pixel],
        [pixel],
        "[image image/png: not shown to this model]",
    ]


@pytest.mark.parametrize(
    "messages",
    [(call("crash"), "done"), (call("crash") + call("note", text="x"), "done")],
    ids=["alone", "beside another call"],
)
async def test_a_sandbox_that_died_is_a_failed_episode_and_never_a_tools_answer(bundle, sandboxes, messages):
    """The model doesn't read of it, and nothing of the episode is left."""
    with pytest.raises(EpisodeFailedError, match="the sandbox of env 'desk' died"):
        await play(bundle, Script(*messages))
    assert sandboxes == {}


async def test_a_sandbox_that_died_between_two_messages_fails_the_episode_before_it_is_scored(bundle, sandboxes):
    """A verifier's word about an env that is gone is worth nothing, so it isn't asked."""

    async def kill(said):
        if said == 1:
            [sandbox] = sandboxes.values()
            sandbox.die()

    with pytest.raises(EpisodeFailedError, match="the sandbox of env 'desk' died"):
        await play(bundle, Script(call("grade", score=1), "done", before=kill))
