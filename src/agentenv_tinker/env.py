"""An episode as a conversation with the model: `EpisodeEnv` holds its rules, from the first prompt to the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import chz
from tinker_cookbook.renderers import Message, Renderer, UnparsedToolCall
from tinker_cookbook.renderers import get_text_content as text_of
from tinker_cookbook.renderers.base import PARSE_FAILURE_DETAIL_MAX_CHARS
from tinker_cookbook.rl import types
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits, TerminationRewardPolicy

from agentenv_tinker.conversation import (
    Answer,
    Call,
    Tool,
    answer_message,
    calls_of,
    clipped,
    next_prompt,
    opening,
    recorded_message,
)
from agentenv_tinker.episode import EpisodeRun, OpenTurn
from agentenv_tinker.errors import EpisodeFailedError

Reward = Callable[[Mapping[str, float]], float]
"""An episode's reward, of the scores it recorded by step id; raises EpisodeFailedError where they make none."""


@chz.chz
class RolloutRules:
    """What bounds a rollout, and what its failures cost."""

    max_turn_messages: int = 8
    """Messages the model may write in one turn; the turn ends at the last."""
    max_tool_calls: int | None = None
    """Tool calls a rollout may make, or None for any number."""
    max_tool_chars: int = 20_000
    """Characters of a tool's answer that the model reads; the rest is cut with a note."""
    max_trajectory_tokens: int | None = None
    """Tokens of prompt and reply a rollout may hold, or None for any number."""
    max_generation_tokens: int | None = None
    """Tokens kept free for a reply within `max_trajectory_tokens`, as the trainer's `max_tokens`."""
    rollout_seconds: float | None = None
    """Wall time of a rollout, from its first observation to its last message, or None for any."""
    rollout_limits: RolloutLimits | None = None
    """Budgets that the cookbook's own rollout runner keeps; its `rollout_timeout_seconds` is `rollout_seconds` here."""
    terminate_on_length: bool = True
    """Whether a reply cut at the sampler's token limit ends the rollout, or is kept and the rollout goes on."""
    tool_execution: Literal["parallel", "sequential"] = "parallel"
    failed_parse_reward: float = 0.0
    """Added for a reply that can't be parsed, which ends the rollout."""
    context_overflow_reward: float = 0.0
    """Added for a rollout cut by its token limits."""
    parse_error_policy: ParseErrorPolicy | None = None
    """How unparsed calls are answered; None ends the rollout at the first."""
    termination_policy: TerminationRewardPolicy | None = None
    """Its `grader_timeout_seconds` bounds the wait after each turn, the last of which brings the episode's scores."""


@dataclass
class _Counts:
    messages: int = 0
    turn_messages: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    consecutive_parse_errors: int = 0


@dataclass(eq=False)
class EpisodeEnv(MessageEnv):
    """An episode as a conversation. The first observation starts it; each step records the model's message, runs its
    calls and appends their answers; a message without a call ends the turn; the last turn's end brings the reward."""

    LOGGED_CHARS = 2000  # of each message, call and answer in the rollout's report; the run record has them whole

    run: EpisodeRun
    renderer: Renderer
    reward: Reward
    rules: RolloutRules
    model_name: str | None = None

    messages: list[Message] = field(default_factory=list, init=False)
    _tools: tuple[Tool, ...] = field(default=(), init=False)
    _system_prompt: str | None = field(default=None, init=False)
    _counts: _Counts = field(default_factory=_Counts, init=False)
    _max_tool_calls: int | None = field(default=None, init=False)
    _parse_error_policy: ParseErrorPolicy | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._max_tool_calls = self.rules.max_tool_calls
        self._parse_error_policy = self.rules.parse_error_policy

    async def initial_observation(self) -> list[Message]:
        """Start the episode, and return its first turn's conversation. Raises EpisodeFailedError."""
        turn = await self.run.start()
        self._tools, self._system_prompt = turn.tools, turn.system_prompt
        try:
            self.messages = opening(self.renderer, turn.tools, turn.system_prompt, turn.prompt, turn.skills)
        except Exception as error:
            await self.run.abandon(f"its first prompt can't be written: {error}")
            raise
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Play one message of the model's. Raises EpisodeFailedError, by which time the episode is torn down."""
        self.messages.append(message)
        self._counts.messages += 1
        self._counts.turn_messages += 1
        result = MessageStepResult(reward=0.0, episode_done=False, next_messages=self.messages)
        if self._counts.messages == 1:
            result.logs["prompt"] = self._logged(text_of(self.messages[-2]))
        if text := text_of(message):
            result.logs["assistant_content"] = self._logged(text)
        unparsed = message.get("unparsed_tool_calls") or []
        if unparsed:
            result.metrics["parse_error"] = 1.0
            result.logs["unparsed"] = self._logged("".join(call.raw_text for call in unparsed))
            result.logs["parse_errors"] = "\n".join(call.error for call in unparsed)
        if unparsed and not message.get("tool_calls"):
            self._counts.consecutive_parse_errors += 1
            return await self._after_parse_error(result, message, unparsed)
        self._counts.consecutive_parse_errors = 0
        return await self._after_calls(result, message)

    async def _after_calls(self, result: MessageStepResult, message: Message) -> MessageStepResult:
        """Run the message's calls, as far as the limits go, and end the turn when it is over."""
        calls = calls_of(message, self._tools)
        allowed = self._allowed(calls)
        await self.run.record(recorded_message(message, allowed), model=self.model_name)
        self._answered(result, allowed, await self.run.act(allowed, in_order=self.rules.tool_execution == "sequential"))
        if calls and self._out_of_messages():
            result.metrics["max_turns"] = 1.0
        if len(allowed) < len(calls):
            result.logs["tool_calls_dropped"] = (
                f"{len(calls) - len(allowed)} tool call(s) dropped: max_tool_calls={self._max_tool_calls} reached"
            )
            result.metrics["max_tool_calls"] = 1.0
            return await self._scored(result, types.StopReason.MAX_TOOL_CALLS)
        if not calls:
            return await self._turn_ended(result, text_of(message), types.StopReason.COMPLETED)
        if self._out_of_messages():
            return await self._turn_ended(result, None, types.StopReason.MAX_TURNS)
        return result

    def _allowed(self, calls: list[Call]) -> list[Call]:
        """The calls that `max_tool_calls` leaves room for, in order."""
        if self._max_tool_calls is None:
            return calls
        return calls[: max(self._max_tool_calls - self._counts.tool_calls, 0)]

    def _answered(self, result: MessageStepResult, calls: list[Call], answers: list[Answer]) -> None:
        """Append the answers to the conversation, in the order of the calls."""
        takes_images = getattr(self.renderer, "image_processor", None) is not None
        for i, (call, answer) in enumerate(zip(calls, answers, strict=True)):
            written = answer_message(call, answer, max_chars=self.rules.max_tool_chars, takes_images=takes_images)
            self.messages.append(written)
            result.logs[f"tool_call_{i}"] = self._logged(call.line)
            result.logs[f"tool_result_{i}"] = self._logged(text_of(written))
        self._counts.tool_calls += len(calls)
        self._counts.tool_errors += sum(answer.is_error for answer in answers)

    async def _turn_ended(
        self, result: MessageStepResult, reply: str | None, reason: types.StopReason
    ) -> MessageStepResult:
        """Hand the turn back, and go on with the next one, or score the episode after the last."""
        turn = await self.run.end_turn(reply, within=self._grader_seconds)
        if turn is None:
            return await self._scored(result, reason)
        await self._opened(turn)
        result.logs["next_prompt"] = self._logged(text_of(self.messages[-1]))
        return result

    async def _opened(self, turn: OpenTurn) -> None:
        """A later turn is the next user message. It must offer the tools of the first: the prefix names them once."""
        now, first = ({tool.name: tool for tool in tools} for tools in (turn.tools, self._tools))
        changed = sorted(name for name in now.keys() | first.keys() if now.get(name) != first.get(name))
        if changed:
            why = f"a later turn offers other tools than the first: {', '.join(changed)}"
            await self.run.abandon(why)
            raise EpisodeFailedError(why)
        self._counts.turn_messages = 0
        self.messages.append(
            next_prompt(
                turn.prompt, turn.system_prompt, in_effect=self._system_prompt, skills=turn.skills, tools=turn.tools
            )
        )
        self._system_prompt = turn.system_prompt or self._system_prompt

    async def _after_parse_error(
        self, result: MessageStepResult, message: Message, unparsed: list[UnparsedToolCall]
    ) -> MessageStepResult:
        """A message of which no call could be read: answered and retried as the policy says, or the rollout's end.

        It ends as the cookbook's own tool env does: with the flat reward for it, and nothing scored.
        """
        policy = self._parse_error_policy
        await self.run.record(recorded_message(message, ()), model=self.model_name)
        if policy is not None:
            result.logs["parse_failure_kind"] = "content"
            if policy.mask_error_turns:
                result.metrics[types.PARSE_ERROR_MASKED_METRIC_KEY] = 1.0
            if self._counts.consecutive_parse_errors <= policy.max_consecutive and not self._out_of_messages():
                details = "\n".join(call.error for call in unparsed)[:PARSE_FAILURE_DETAIL_MAX_CHARS]
                self.messages.append(
                    Message(role="user", content=policy.retry_message_template.format(details=details))
                )
                errors = self._counts.consecutive_parse_errors
                result.logs["parse_error_retry"] = f"parse error {errors} in a row, of {policy.max_consecutive} allowed"
                result.reward = -policy.penalty_per_error
                return result
        if self._out_of_messages():
            result.metrics["max_turns"] = 1.0
        result.metrics[f"{types.STOP_METRIC_PREFIX}{types.StopReason.PARSE_ERROR}"] = 1.0
        result.reward = policy.terminal_reward if policy is not None else self.rules.failed_parse_reward
        result.episode_done = True
        result.metrics.update(self._totals(cut=False))
        await self.run.abandon("none of a message's tool calls could be parsed")
        return result

    def _out_of_messages(self) -> bool:
        return self._counts.turn_messages >= self.rules.max_turn_messages

    async def _scored(self, result: MessageStepResult, reason: types.StopReason) -> MessageStepResult:
        """The episode's end: its scores as metrics, and their reward."""
        reward, metrics = await self._scores(cut=False)
        result.reward += reward
        result.episode_done = True
        result.metrics.update(metrics)
        result.metrics[f"{types.STOP_METRIC_PREFIX}{reason}"] = 1.0
        return result

    async def score_cut(self) -> tuple[float, types.Metrics]:
        """Score a rollout where it was cut: its open turn ends with no reply. Raises EpisodeFailedError."""
        return await self._scores(cut=True)

    async def record_cut(self, text: str) -> types.Logs:
        """Record a reply that was cut before it could be played, and return its log. Raises EpisodeFailedError."""
        await self.run.record({"role": "assistant", "content": text}, model=self.model_name)
        return {"assistant_content": self._logged(text)}

    async def _scores(self, *, cut: bool) -> tuple[float, types.Metrics]:
        scores = await self.run.scores(within=self._grader_seconds)
        scored = {f"score/{step}": score for step, score in scores.items()}
        return self.reward(scores), {**scored, **self._totals(cut=cut)}

    @property
    def _grader_seconds(self) -> float | None:
        policy = self.rules.termination_policy
        return policy.grader_timeout_seconds if policy is not None else None

    def _totals(self, *, cut: bool) -> types.Metrics:
        counts = self._counts
        return {
            "messages": counts.messages,
            "tool_calls": counts.tool_calls,
            "tool_errors": counts.tool_errors,
            "cut": float(cut),
        }

    def _logged(self, text: str) -> str:
        return clipped(text, self.LOGGED_CHARS)

    def set_max_tool_calls(self, max_tool_calls: int) -> None:
        """Bound the rollout's tool calls; the tighter of two bounds wins."""
        known = self._max_tool_calls
        self._max_tool_calls = max_tool_calls if known is None else min(known, max_tool_calls)

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        """Answer unparsed calls as `policy` says."""
        self._parse_error_policy = policy

    async def observe_truncated_response(self, message: Message) -> list[Message]:
        """Keep a reply that was cut at the per-turn token limit in the conversation; none of its calls run."""
        await self.run.record(recorded_message(message, ()), model=self.model_name)
        self.messages.append(message)
        return self.messages

    async def add_messages(self, messages: list[Message]) -> list[Message]:
        """Append messages from outside the episode to the conversation."""
        self.messages.extend(messages)
        return self.messages
