"""A model that says what a script says, and a renderer whose tokens are the characters of the conversation.

A message is `<role>text` and an end of text; calls are `<tool_call>` blocks and thinking a `<think>` block, both read
by the cookbook's own parser.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import Message, Renderer, ToolSpec, UnparsedToolCall, register_renderer
from tinker_cookbook.renderers.base import (
    ParseTermination,
    RenderContext,
    RenderedMessage,
    parse_content_blocks,
)
from tinker_cookbook.tokenizer_utils import register_tokenizer

MODEL = "stand-in/model"
RENDERER = "stand-in/characters"
VISION_RENDERER = "stand-in/vision"
NO_TOOLS_RENDERER = "stand-in/no-tools"
END = 3


class CharacterTokenizer:
    """A token is a character's code point."""

    eos_token_id = END
    name_or_path = MODEL

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


class CharacterRenderer(Renderer):
    has_extension_property = True

    def get_stop_sequences(self) -> list[int]:
        return [END]

    def create_conversation_prefix_with_tools(self, tools: list[ToolSpec], system_prompt: str = "") -> list[Message]:
        lines = [f"{tool['name']}: {tool['description']} {json.dumps(tool['parameters'])}" for tool in tools]
        return [Message(role="system", content="\n".join([system_prompt, "tools:", *lines]))]

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        return RenderedMessage(header=self._chunk(f"<{message['role']}>"), output=[self._chunk(written(message))])

    def _chunk(self, text: str) -> tinker.EncodedTextChunk:
        return tinker.EncodedTextChunk(tokens=self.tokenizer.encode(text))

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        text = self.tokenizer.decode([token for token in response if token != END])
        message = Message(role="assistant", content=text)
        if not response or response[-1] != END:
            return message, ParseTermination.MALFORMED
        if (blocks := parse_content_blocks(text)) is not None:
            parts, calls = blocks
            message["content"] = parts
            unparsed = [call for call in calls if isinstance(call, UnparsedToolCall)]
            if parsed := [call for call in calls if not isinstance(call, UnparsedToolCall)]:
                message["tool_calls"] = parsed
            if unparsed:
                message["unparsed_tool_calls"] = unparsed
        return message, ParseTermination.STOP_SEQUENCE


class NoToolsRenderer(CharacterRenderer):
    def create_conversation_prefix_with_tools(self, tools: list[ToolSpec], system_prompt: str = "") -> list[Message]:
        raise NotImplementedError


class VisionRenderer(CharacterRenderer):
    image_processor = "stand-in"


def written(message: Message) -> str:
    """A message's text as the stand-in's conversation has it, its end included."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    shown = {"text": lambda part: part["text"], "thinking": lambda part: f"<think>{part['thinking']}</think>"}
    text = "".join(shown.get(part["type"], lambda part: f"<{part['type']}>")(part) for part in parts)
    calls = "".join(
        call(c.function.name, id=c.id, **json.loads(c.function.arguments)) for c in message.get("tool_calls") or []
    )
    unparsed = "".join(c.raw_text for c in message.get("unparsed_tool_calls") or [])
    return text + calls + unparsed + chr(END)


def call(tool: str, *, id: str | None = None, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    block = {"name": tool, "arguments": arguments} | ({"id": id} if id is not None else {})
    return f"<tool_call>{json.dumps(block)}</tool_call>"


BAD_CALL = "<tool_call>{not json</tool_call>"


@dataclass(frozen=True)
class Truncated:
    """A reply that the sampler cut at its token limit."""

    text: str


@dataclass(frozen=True)
class Unended:
    """A reply without its end, though the sampler says that it stopped: broken framing."""

    text: str


Reply = str | Truncated | Unended


@dataclass
class Script(TokenCompleter):
    """A model whose n-th message of a conversation is the n-th of `replies`, and the last one from there on."""

    replies: tuple[Reply, ...]
    before: Callable[[int], Any] | None = None
    """Awaited before each message with how many came before."""
    prompts: list[str] = field(default_factory=list)

    def __init__(self, *replies: Reply, before: Callable[[int], Any] | None = None) -> None:
        self.replies, self.before, self.prompts = replies, before, []

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        prompt = CharacterTokenizer().decode(model_input.to_ints())
        self.prompts.append(prompt)
        said = prompt.count("<assistant>") - 1
        if self.before is not None:
            await self.before(said)
        return sampled(self.replies[min(said, len(self.replies) - 1)])


def sampled(reply: Reply) -> TokensWithLogprobs:
    """A reply as the sampler returns it."""
    text = reply if isinstance(reply, str) else reply.text
    tokens = CharacterTokenizer().encode(text) + ([END] if isinstance(reply, str) else [])
    return TokensWithLogprobs(
        tokens=tokens,
        maybe_logprobs=[-0.5] * len(tokens),
        stop_reason="length" if isinstance(reply, Truncated) else "stop",
    )


def register() -> None:
    """Make the renderers and the tokenizer known to the cookbook in this process."""
    register_tokenizer(MODEL, CharacterTokenizer)
    register_renderer(RENDERER, lambda tokenizer, image_processor=None: CharacterRenderer(tokenizer))
    register_renderer(VISION_RENDERER, lambda tokenizer, image_processor=None: VisionRenderer(tokenizer))
    register_renderer(NO_TOOLS_RENDERER, lambda tokenizer, image_processor=None: NoToolsRenderer(tokenizer))
