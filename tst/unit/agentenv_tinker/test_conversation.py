"""How tools, prompts, calls and answers read: to the model, and to the run's record."""

import pytest
from tinker_cookbook.renderers import Message, TextPart, ThinkingPart, ToolCall, UnparsedToolCall

from agentenv_tinker.conversation import (
    READ_SKILL,
    Answer,
    Call,
    Skill,
    Tool,
    answer_message,
    calls_of,
    clipped,
    next_prompt,
    opening,
    read_skill_tool,
    recorded_message,
    tool_prefix,
)
from agentenv_tinker.errors import ConfigError

ADD = Tool("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
BASH = Tool("bash", "Run.", {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]})
SKILL = Skill("greet", "How to greet.", "/skills/greet")


class Writes:
    """A renderer, as far as a prefix needs one."""

    def create_conversation_prefix_with_tools(self, tools, system_prompt=""):
        return [Message(role="system", content=f"{system_prompt}|{[tool['name'] for tool in tools]}")]


class WritesNoTools:
    def create_conversation_prefix_with_tools(self, tools, system_prompt=""):
        raise NotImplementedError


def called(name, arguments, id=None):
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments), id=id)


def said(content="", *calls, unparsed=()):
    message = Message(role="assistant", content=content)
    if calls:
        message["tool_calls"] = list(calls)
    if unparsed:
        message["unparsed_tool_calls"] = list(unparsed)
    return message


@pytest.mark.parametrize(
    ("tools", "system_prompt", "messages"),
    [
        ([ADD], "Be kind.", [("system", "Be kind.|['add']"), ("user", "Go.")]),
        ([ADD], None, [("system", "|['add']"), ("user", "Go.")]),
        ([], "Be kind.", [("system", "Be kind."), ("user", "Go.")]),
        ([], None, [("user", "Go.")]),
    ],
)
def test_a_conversation_opens_with_the_system_prompt_and_the_tools(tools, system_prompt, messages):
    """By the renderer's own prefix where there are tools."""
    opened = opening(Writes(), tools, system_prompt, "Go.")
    assert [(message["role"], message["content"]) for message in opened] == messages


def test_a_renderer_that_can_write_no_tools_is_refused_with_one_that_can():
    """Before an episode goes on with a model that can't act."""
    with pytest.raises(ConfigError, match="renderer WritesNoTools can't write tools; choose one that can, such as"):
        tool_prefix(WritesNoTools(), [ADD], None)


@pytest.mark.parametrize(
    ("system_prompt", "in_effect", "written"),
    [
        ("Be brief.", "Be kind.", "Be brief.\n\nOn."),
        ("Be kind.", "Be kind.", "On."),
        (None, "Be kind.", "On."),
        ("Be brief.", None, "Be brief.\n\nOn."),
    ],
)
def test_a_later_prompt_brings_its_system_prompt_where_that_has_changed(system_prompt, in_effect, written):
    """As text, before the prompt."""
    message = next_prompt("On.", system_prompt, in_effect=in_effect, skills=[], tools=[ADD])
    assert message == Message(role="user", content=written)


@pytest.mark.parametrize(("tool", "how"), [(BASH, "bash"), (read_skill_tool(), READ_SKILL)])
def test_a_prompt_shows_the_skills_that_it_brings_and_how_to_read_them(tool, how):
    """Whether it is the first or a later one."""
    shown = f"You have these skills; read a skill's SKILL.md with {how} before you use it:\n"
    shown += "- greet: How to greet. (/skills/greet)\n\nGo."
    assert opening(Writes(), [tool], None, "Go.", [SKILL])[-1]["content"] == shown
    later = next_prompt("Go.", "Be brief.", in_effect=None, skills=[SKILL], tools=[tool])
    assert later["content"] == shown.replace("Go.", "Be brief.\n\nGo.")


@pytest.mark.parametrize(
    ("call", "read"),
    [
        (called("add", '{"a": "1"}', "c1"), Call("c1", "add", {"a": 1})),
        (called("add", ""), Call(None, "add", {})),
        (called("sub", "{}"), Call(None, "sub", {}, "there is no tool 'sub'; the tools are add, bash")),
        (called("add", "[1]"), Call(None, "add", {}, "the arguments must be a JSON object, not [1]")),
        (called("bash", "{}"), Call(None, "bash", {}, "the argument 'command' is missing")),
        (called("bash", '{"command": 5}'), Call(None, "bash", {"command": "5"})),
    ],
)
def test_a_call_is_typed_or_says_why_it_cannot_run(call, read):
    """The model reads that as the tool's answer."""
    assert calls_of(said("", call), [ADD, BASH]) == [read]


def test_arguments_that_are_no_json_are_shown_back_to_the_model():
    """With what is wrong about them."""
    [call] = calls_of(said("", called("add", "{a: 1}")), [ADD])
    assert call.problem.startswith("the arguments aren't JSON (Expecting property name")
    assert call.problem.endswith(": {a: 1}")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (called("add", '{"a": "1"}'), 'add({"a": 1})'),
        (called("add", "{a: 1}"), "add({a: 1})"),
        (called("sub", '{"a": "1"}'), 'sub({"a": "1"})'),
    ],
)
def test_a_call_reads_in_a_report_as_it_runs_or_as_it_was_written(call, line):
    """So that one which can't run is seen as the model made it."""
    assert calls_of(said("", call), [ADD])[0].line == line


def test_a_message_is_recorded_with_the_calls_that_will_run_and_all_that_was_said():
    """A call that can't run isn't one that the run waits for."""
    message = said(
        [ThinkingPart(type="thinking", thinking="hm"), TextPart(type="text", text="I add.")],
        called("add", '{"a": "1"}', "c1"),
        called("sub", "{}"),
        called("add", '{"a": 2}'),
        unparsed=[UnparsedToolCall(raw_text="<bad>", error="bad")],
    )
    assert recorded_message(message, calls_of(message, [ADD])) == {
        "role": "assistant",
        "content": "I add.<bad>",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
        ],
    }
    assert recorded_message(said("Done."), []) == {"role": "assistant", "content": "Done."}


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (Answer([{"type": "text", "text": "3"}]), "3"),
        (Answer([{"type": "text", "text": "3"}, {"type": "text", "text": "4"}]), "3\n4"),
        (Answer([]), ""),
        (Answer.error("no"), "Error: no"),
        (Answer.error("error: no"), "error: no"),
        (Answer.error(""), "Error: "),
        (
            Answer([{"type": "audio", "mimeType": "audio/wav", "data": ""}]),
            "[audio audio/wav: not shown to this model]",
        ),
        (Answer([{"type": "resource", "resource": {"uri": "x", "text": "the file"}}]), "the file"),
        (Answer([{"type": "resource_link", "uri": "x"}]), "[resource_link: not shown to this model]"),
    ],
)
def test_an_answer_is_text_and_an_error_is_marked_as_one(answer, read):
    """What isn't text is a placeholder that says so."""
    message = answer_message(Call("c1", "add", {}), answer, max_chars=100, takes_images=False)
    assert message == Message(role="tool", content=read, name="add", tool_call_id="c1")


def test_long_text_is_clipped_with_how_much_was_cut():
    """And text that fits is left as it is."""
    assert clipped("abcdef", 4) == "abcd\n[2 more characters cut]"
    assert clipped("abcd", 4) == "abcd"
