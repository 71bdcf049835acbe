"""A rollout of an episode: the cookbook's token-level env, with the rule that a rollout is scored wherever it is cut.

The cookbook cuts a rollout in a step (token limit, context overflow, broken framing), before the first one (a prompt
over the budget) or outside of any (its runner's budgets); `rollout_seconds` cuts it at any time. Each time the episode
is scored at once, which gives its slot back while the rest of the group plays on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import chz
import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl import types
from tinker_cookbook.rl.message_env import EnvFromMessageEnv

from agentenv_tinker.env import EpisodeEnv, RolloutRules
from agentenv_tinker.errors import EpisodeFailedError, described

_T = TypeVar("_T")
Scored = tuple[float, types.Metrics]


class RolloutEnv(EnvFromMessageEnv):
    """An `EpisodeEnv` at the token level. Every method that raises has torn the episode down first."""

    def __init__(self, env: EpisodeEnv) -> None:
        rules = env.rules
        super().__init__(
            env.renderer,
            env,
            failed_parse_reward=rules.failed_parse_reward,
            context_overflow_reward=rules.context_overflow_reward,
            max_trajectory_tokens=rules.max_trajectory_tokens,
            max_generation_tokens=rules.max_generation_tokens,
            parse_error_policy=rules.parse_error_policy,
            terminate_on_length=rules.terminate_on_length,
            # the wall time is kept here, since the runner's own clock stops a rollout without a word to its env
            rollout_limits=rules.rollout_limits and chz.replace(rules.rollout_limits, rollout_timeout_seconds=None),
        )
        self.episode = env
        self._steps = asyncio.Lock()  # held by a step, and by the timer's cut: neither comes amid the other
        self._timer: asyncio.Task[None] | None = None
        self._cut: asyncio.Task[Scored] | None = None  # the scoring of a rollout that was cut outside of any step
        self._paid = False  # whether a step, or the first observation, has brought the reward
        self._ending: asyncio.Task[None] | None = None

    async def initial_observation(
        self,
    ) -> tuple[types.Observation, StopCondition] | types.InitialObservationOverflow:
        """Start the episode. One whose first prompt is over the token limit is scored as it stands."""
        rollout = asyncio.current_task()
        try:
            observed = await super().initial_observation()
            if isinstance(observed, types.InitialObservationOverflow):
                reward, metrics = await self.episode.score_cut()
                self._paid = True
                return replace(
                    observed,
                    reward=observed.reward + reward,
                    metrics={**observed.metrics, **metrics},
                    logs={**observed.logs, **self.episode.run.labels},
                )
        except BaseException as error:
            await self.abandon(f"its first observation failed: {described(error)}")
            raise
        if rollout is not None:
            rollout.add_done_callback(self._rollout_ended)
        seconds = _rollout_seconds(self.episode.rules)
        if seconds is not None:
            self._timer = asyncio.create_task(self._time_out(seconds))
        return observed

    async def step(self, action: types.Action, *, extra: types.ActionExtra | None = None) -> types.StepResult:
        """Play one sampled message. Raises EpisodeFailedError."""
        async with self._steps:
            result = await (self._step(action, extra) if self._cut is None else self._timed_out(self._cut))
            if result.episode_done:
                result.logs.update(self.episode.run.labels)
                self._paid = True
                self._stop_timer()
            return result

    async def _step(self, action: types.Action, extra: types.ActionExtra | None) -> types.StepResult:
        played = len(self.episode.messages)
        try:
            result = await super().step(action, extra=extra)
            if result.episode_done and not self.episode.run.over:
                if len(self.episode.messages) == played:
                    result.logs.update(await self.episode.record_cut(str(self.renderer.tokenizer.decode(action))))
                reward, metrics = await self.episode.score_cut()
                result.reward += reward
                result.metrics.update(metrics)
        except BaseException as error:
            await self.abandon(f"a step failed: {described(error)}")
            raise
        return result

    async def _timed_out(self, cut: asyncio.Task[Scored]) -> types.StepResult:
        """What the message that the model was writing when its time was up comes to: the score of then."""
        reward, metrics = await asyncio.shield(cut)
        return types.StepResult(
            reward=reward,
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=self.renderer.get_stop_sequences(),
            metrics={**metrics, f"{types.STOP_METRIC_PREFIX}{types.StopReason.ROLLOUT_TIMEOUT}": 1.0},
        )

    async def late_reward(self) -> Scored:
        """What the rollout's steps haven't brought of its reward: the score of one that was cut outside of them.

        Raises EpisodeFailedError where the episode never came to a score.
        """
        if self._paid:
            return 0.0, {}
        if self._cut is None:
            if self.episode.run.over:
                raise EpisodeFailedError("the rollout was stopped as its episode acted, before it could be scored")
            self._score_cut()
        assert self._cut is not None
        scored = await asyncio.shield(self._cut)
        self._paid = True
        return scored

    async def abandon(self, reason: str) -> None:
        """Stop the episode, unless it is over or being scored, and wait until all that it held is given back."""
        self._stop_timer()
        if self._cut is not None:
            await asyncio.wait([self._cut])
        await self.episode.run.abandon(reason)

    def _rollout_ended(self, rollout: asyncio.Task[Any]) -> None:
        """See to an episode whose rollout ended with no word to it, as its runner's budgets, a failed sampler and a
        cancellation end one: without this it would keep its slot until the whole group is over."""
        self._stop_timer()
        if self._cut is not None or self.episode.run.over:
            return
        if rollout.cancelled() or rollout.exception() is not None:
            self._ending = _task(self.episode.run.abandon("the rollout was cancelled, or failed outside its episode"))
        else:
            self._score_cut()

    async def _time_out(self, seconds: float) -> None:
        """Score the rollout when its time is up, while the model still writes."""
        await asyncio.sleep(seconds)
        async with self._steps:
            if not self.episode.run.over:
                self._score_cut()

    def _score_cut(self) -> None:
        self._cut = _task(self.episode.score_cut())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _rollout_seconds(rules: RolloutRules) -> float | None:
    """The wall time of a rollout: the tighter of its two limits."""
    limits = rules.rollout_limits
    given = (rules.rollout_seconds, limits.rollout_timeout_seconds if limits is not None else None)
    return min((seconds for seconds in given if seconds is not None), default=None)


def _task(doing: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """`doing` as a task whose failure is for whoever asks for its result, if anybody does."""
    task = asyncio.create_task(doing)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
