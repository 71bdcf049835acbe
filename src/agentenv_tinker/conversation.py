"""How an episode reads to the model, and the model to the episode: tools, prompts, calls and answers as messages."""

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from tinker_cookbook.renderers import ContentPart, ImagePart, Message, Renderer, TextPart, ToolCall, ToolSpec
from tinker_cookbook.renderers import get_text_content as text_of

from agentenv_tinker.arguments import typed_arguments
from agentenv_tinker.errors import ConfigError

READ_SKILL = "read_skill"


@dataclass(frozen=True)
class Tool:
    """A tool that a turn offers."""

    name: str
    description: str
    schema: Mapping[str, Any]
    """The JSON schema of its arguments, an object."""


@dataclass(frozen=True)
class Skill:
    """A skill that a turn brings: a folder whose `SKILL.md` says how to do something."""

    name: str
    description: str
    path: str
    """Where the agent's sandbox has it."""


def read_skill_tool() -> Tool:
    """The tool by which a model without a shell reads its skills."""
    properties = {
        "skill": {"type": "string", "description": "The skill's name."},
        "path": {"type": "string", "description": "The file in the skill, SKILL.md if not given."},
    }
    schema = {"type": "object", "properties": properties, "required": ["skill"]}
    return Tool(READ_SKILL, "Read a file of a skill.", schema)


@dataclass(frozen=True)
class Answer:
    """What a tool call came to."""

    content: Sequence[Mapping[str, Any]]
    """MCP content blocks: text, image, and what else the env sends."""
    is_error: bool = False

    @classmethod
    def error(cls, text: str) -> "Answer":
        return cls([{"type": "text", "text": text}], is_error=True)


@dataclass(frozen=True)
class Call:
    """A tool call as it will run: its arguments typed by the tool's schema, or why it can't run at all."""

    id: str | None
    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None
    written: str = field(default="", compare=False)
    """The arguments as the model wrote them."""

    @property
    def line(self) -> str:
        """The call in one line: with the arguments that it runs with, or those that can't run."""
        arguments = self.written if self.problem else json.dumps(self.arguments, ensure_ascii=False)
        return f"{self.name}({arguments})"


def opening(
    renderer: Renderer, tools: Sequence[Tool], system_prompt: str | None, prompt: str, skills: Sequence[Skill] = ()
) -> list[Message]:
    """The first turn's messages: the system prompt and the tools in the renderer's own prefix, then the prompt.

    Raises ConfigError where there are tools and the renderer can't write them.
    """
    messages: list[Message] = []
    if tools:
        messages += tool_prefix(renderer, tools, system_prompt)
    elif system_prompt:
        messages.append(Message(role="system", content=system_prompt))
    return [*messages, _prompt(prompt, skills, tools)]


def tool_prefix(renderer: Renderer, tools: Sequence[Tool], system_prompt: str | None) -> list[Message]:
    """The messages by which `renderer` tells a model of `tools`. Raises ConfigError where it has no way to."""
    specs = [ToolSpec(name=tool.name, description=tool.description, parameters=dict(tool.schema)) for tool in tools]
    try:
        return renderer.create_conversation_prefix_with_tools(specs, system_prompt or "")
    except NotImplementedError:
        raise ConfigError(
            f"renderer {type(renderer).__name__} can't write tools; choose one that can, such as 'qwen3_instruct'"
        ) from None


def next_prompt(
    prompt: str, system_prompt: str | None, *, in_effect: str | None, skills: Sequence[Skill], tools: Sequence[Tool]
) -> Message:
    """A later turn's prompt as the next user message, after its system prompt where that isn't `in_effect` yet."""
    if system_prompt and system_prompt != in_effect:
        prompt = f"{system_prompt}\n\n{prompt}"
    return _prompt(prompt, skills, tools)


def _prompt(prompt: str, skills: Sequence[Skill], tools: Sequence[Tool]) -> Message:
    """A turn's prompt, after the skills that it brings."""
    if skills:
        how = READ_SKILL if any(tool.name == READ_SKILL for tool in tools) else "bash"
        lines = "\n".join(f"- {skill.name}: {skill.description} ({skill.path})" for skill in skills)
        prompt = f"You have these skills; read a skill's SKILL.md with {how} before you use it:\n{lines}\n\n{prompt}"
    return Message(role="user", content=prompt)


def calls_of(message: Message, tools: Sequence[Tool]) -> list[Call]:
    """The calls that the model's `message` makes of `tools`, in order, those that can't run included."""
    offered = {tool.name: tool for tool in tools}
    return [_call(call, offered) for call in message.get("tool_calls") or []]


def _call(call: ToolCall, offered: Mapping[str, Tool]) -> Call:
    name, written = call.function.name, call.function.arguments or "{}"
    try:
        arguments = json.loads(written)
    except ValueError as error:
        return Call(call.id, name, {}, f"the arguments aren't JSON ({error}): {written}", written)
    if not isinstance(arguments, dict):
        return Call(call.id, name, {}, f"the arguments must be a JSON object, not {written}", written)
    if name not in offered:
        problem = f"there is no tool {name!r}; the tools are {', '.join(sorted(offered))}"
        return Call(call.id, name, arguments, problem, written)
    typed = typed_arguments(arguments, offered[name].schema)
    if name == "bash" and "command" in offered[name].schema.get("required", ()) and "command" not in typed:
        # else the episode, and not bash, refuses it
        return Call(call.id, name, typed, "the argument 'command' is missing", written)
    return Call(call.id, name, typed, written=written)


def recorded_message(message: Message, calls: Iterable[Call]) -> dict[str, Any]:
    """The model's message as the run record keeps it: an OpenAI chat message making the calls that will run."""
    thinking = "".join(part["thinking"] for part in _parts(message) if part["type"] == "thinking")
    unparsed = "".join(call.raw_text for call in message.get("unparsed_tool_calls") or [])
    record: dict[str, Any] = {"role": "assistant", "content": text_of(message) + unparsed}
    if thinking:
        record["reasoning_content"] = thinking
    tool_calls = [
        {
            "id": call.id or f"call_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for i, call in enumerate(calls)
        if call.problem is None
    ]
    return {**record, "tool_calls": tool_calls} if tool_calls else record


def _parts(message: Message) -> list[ContentPart]:
    content = message["content"]
    return [TextPart(type="text", text=content)] if isinstance(content, str) else list(content)


def answer_message(call: Call, answer: Answer, *, max_chars: int, takes_images: bool) -> Message:
    """A tool's answer as the model reads it: errors marked, long text clipped, images shown where they can be."""
    images = [block for block in answer.content if takes_images and _is_image(block)]
    text = "\n".join(_block_text(block) for block in answer.content if block not in images)
    if answer.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    text = clipped(text, max_chars)
    content: str | list[ContentPart] = text
    if images:
        shown = [TextPart(type="text", text=text)] if text else []
        content = [*shown, *map(_image_part, images)]
    return Message(role="tool", content=content, name=call.name, tool_call_id=call.id or "")


def _is_image(block: Mapping[str, Any]) -> bool:
    """Whether `block` is an image that can be opened."""
    if block.get("type") != "image":
        return False
    try:
        with Image.open(io.BytesIO(base64.b64decode(block["data"]))) as image:
            image.verify()
    except Exception:  # PIL raises whatever a broken file makes it raise
        return False
    return True


def _image_part(block: Mapping[str, Any]) -> ImagePart:
    return ImagePart(type="image", image=f"data:{block.get('mimeType', 'image/png')};base64,{block['data']}")


def _block_text(block: Mapping[str, Any]) -> str:
    """A block as text: its own, that of a resource, or a placeholder that says what isn't shown."""
    resource = block.get("resource")
    if isinstance(resource, Mapping) and isinstance(resource.get("text"), str):
        return str(resource["text"])
    if block.get("type") == "text":
        return str(block.get("text", ""))
    return f"[{block.get('type', 'content')} {block.get('mimeType', '')}".rstrip() + ": not shown to this model]"


def clipped(text: str, max_chars: int) -> str:
    """`text`, or its first `max_chars` characters and a note of how many were cut."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[{len(text) - max_chars} more characters cut]"
