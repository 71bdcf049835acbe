"""Plays one episode of a task: starts it, runs its turns' calls, scores it, and always gives back what it held.

The rules of the conversation are env.py's; here are the run, its deadlines, its slot and its record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentenv_tinker import framework
from agentenv_tinker.bundle import PlayableTask
from agentenv_tinker.conversation import READ_SKILL, Answer, Call, Skill, Tool, read_skill_tool
from agentenv_tinker.errors import EpisodeFailedError, EpisodeTimeoutError, described
from agentenv_tinker.records import RunFile
from agentenv_tinker.sandboxes import verdicts
from agentenv_tinker.slots import Slot, slots, starts

_T = TypeVar("_T")

AHEAD_SECONDS = 900.0  # that a run started ahead waits to be claimed, before it is abandoned
_ANSWER_SECONDS = 60.0  # past its own deadline, which a call's proxy keeps, before a call counts as lost

_live: set[EpisodeRun] = set()
_played = 0  # episodes of this process that are over


@dataclass(frozen=True)
class Deadlines:
    """How long each wait of an episode may take, in seconds."""

    start: float = 600.0
    """From the start to the first turn: deploys, builds and setup steps."""
    call: float = 120.0
    """One tool call."""
    end: float = 600.0
    """From a turn's end to the next turn or the scores, teardown included."""


@dataclass(frozen=True)
class OpenTurn:
    """A turn as its conversation needs it."""

    prompt: str
    system_prompt: str | None
    tools: tuple[Tool, ...]
    skills: tuple[Skill, ...]
    """Those that this turn brings and no turn before it did."""


@dataclass(eq=False)
class EpisodeRun:
    """One run of a task. Start it, act and end turns until `end_turn` returns None, then take its scores.

    `start_ahead` has it start before it is asked for; it is then claimed before `start`, or abandoned.
    Every method raises EpisodeFailedError once the run has failed, and by then the run is abandoned, torn down and
    filed, and its slot free. `abandon` does the same at any time, once.
    """

    task: PlayableTask
    sandbox: str | None
    run_group: str
    max_concurrent: int
    deadlines: Deadlines = field(default_factory=Deadlines)

    _file: RunFile = field(init=False)
    _episode: framework.Episode | None = field(default=None, init=False)
    _turn: framework.Turn | None = field(default=None, init=False)
    _tools: framework.TurnTools | None = field(default=None, init=False)
    _known_skills: set[str] = field(default_factory=set, init=False)
    _closing: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)
    _slot: Slot | None = field(default=None, init=False)
    _early: asyncio.Task[OpenTurn] | None = field(default=None, init=False)
    _unused: bool = field(default=False, init=False)  # whether it was started ahead, and is not claimed yet
    _expiry: asyncio.TimerHandle | None = field(default=None, init=False)
    _leaving: asyncio.Task[None] | None = field(default=None, init=False)
    _failure: EpisodeFailedError | None = field(default=None, init=False)
    _ending: asyncio.Task[None] | None = field(default=None, init=False)
    _over: bool = field(default=False, init=False)
    _overran: bool = field(default=False, init=False)  # whether a call was given up on, which its env may still work at

    def __post_init__(self) -> None:
        self._file = RunFile(self.task.prepared.task, self.run_group)

    @property
    def labels(self) -> dict[str, str]:
        """What a rollout's report names it by: its task, and its run in the framework's records."""
        run = self._episode.id if self._episode is not None else ""
        return {"task": self.task.name, "task_id": self.task.prepared.task.id, "run": run}

    @property
    def over(self) -> bool:
        """Whether the run has ended or is being abandoned."""
        return self._over

    def start_ahead(self) -> None:
        """Start the run once there is a slot that nobody asks for. It gives way, abandoned, to who asks for it."""
        self._unused = True
        _live.add(self)
        self._early = asyncio.create_task(self._started_ahead())
        self._early.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def claim(self) -> bool:
        """Whether the run, started ahead, is used from now on. One that has no slot, or failed, or whose envs are gone,
        is abandoned in the background."""
        assert self._early is not None
        if self._slot is None or self._over or not self._slot.claim():
            self.give_way()
            return False
        self._unused = False
        self._stop_expiry()
        if self._episode is not None:
            await self._file.open(self._episode)
        if not self._early.done():
            return True
        try:
            await self._bounded(self._check_envs(), self.deadlines.call, "to look at its envs")
        except EpisodeFailedError:
            return False
        return True

    def give_way(self) -> None:
        """Abandon the run in the background, unless it is over."""
        if not self._over:
            self._leaving = asyncio.create_task(self.abandon("it was started ahead, and is not used"))

    async def start(self) -> OpenTurn:
        """Wait for a slot, start the run, and return its first turn; at once where it has reached that ahead."""
        if self._early is not None:
            return await self._early
        return await self._begun(await slots(self.max_concurrent).take())

    async def _started_ahead(self) -> OpenTurn:
        slot = await slots(self.max_concurrent).take_ahead(self.give_way)
        self._expiry = asyncio.get_running_loop().call_later(AHEAD_SECONDS, self.give_way)
        return await self._begun(slot)

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    async def _begun(self, slot: Slot) -> OpenTurn:
        """Start the run, which has a slot now, and return its first turn."""
        verdicts.expect()
        if self._over:
            slot.give_back()
            raise EpisodeFailedError(f"{self._name}: it was abandoned before it started")
        self._slot = slot
        _live.add(self)
        async with self._may_start():
            turn = await self._bounded(self._started(), self.deadlines.start, "to reach its first turn")
        if turn is None:
            raise await self._failed(EpisodeFailedError("the run ended before the agent's first turn"))
        return turn

    @asynccontextmanager
    async def _may_start(self) -> AsyncIterator[None]:
        """The block is one of the few that start at once, and the run was not abandoned before. No deadline runs while
        it waits for that: those before it have theirs."""
        try:
            await starts().acquire()
        except asyncio.CancelledError:
            await self.abandon("the rollout was cancelled")
            raise
        try:
            if self._over:
                raise EpisodeFailedError(f"{self._name}: it was abandoned before it started")
            yield
        finally:
            starts().release()

    async def record(self, message: dict[str, Any], *, model: str | None) -> None:
        """Record the model's message on the turn, before its calls run."""
        turn = self._open_turn()
        await self._bounded(turn.record_model_call(message, model=model), self.deadlines.call, "to record a message")

    async def act(self, calls: Sequence[Call], *, in_order: bool) -> list[Answer]:
        """Run `calls`, at once or `in_order`, and return their answers in the order of the calls."""
        if in_order:
            return [await self._answer(call) for call in calls]
        answers = await asyncio.gather(*map(self._answer, calls), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            raise failures[0]
        return [answer for answer in answers if isinstance(answer, Answer)]

    async def end_turn(self, reply: str | None, *, within: float | None = None) -> OpenTurn | None:
        """Hand the turn back with `reply`, and return the next turn, or None when the run has no more.

        `within`, in seconds, is a tighter deadline than the run's own: after its last turn, a run is scored here.
        """
        turn = self._open_turn()

        async def ended() -> OpenTurn | None:
            await self._check_envs()
            await framework.end_turn(turn, reply)
            return await self._next_turn()

        return await self._bounded(ended(), self._end_seconds(within), "to go on after a turn")

    async def scores(self, *, within: float | None = None) -> dict[str, float]:
        """End what turns are open or still come with no reply, and return the run's scores by step id.

        `within`, in seconds, is a tighter deadline than the run's own. Raises EpisodeFailedError where the run
        failed by the framework's own rule, softly failed steps included.
        """
        scores = await self._bounded(self._finished(), self._end_seconds(within), "to be scored")
        self._ending = asyncio.create_task(self._settle(framework.RunStatus.COMPLETED, None))
        await _to_its_end(self._ending)
        return scores

    async def abandon(self, reason: str) -> None:
        """Stop the run, wait for its teardown and give its slot back. Once is enough, and more does no harm."""
        if self._early is not None and self._slot is None:
            self._early.cancel()  # it waits for a slot
        await self._end(framework.RunStatus.CANCELED, reason)

    def _end_seconds(self, within: float | None) -> float:
        return self.deadlines.end if within is None else min(self.deadlines.end, within)

    async def _started(self) -> OpenTurn | None:
        episode = await self.task.spec.start(sandbox=self.sandbox)
        self._episode = episode
        if self._over:  # abandoned while it started, when there was no episode to abandon yet
            await episode.abandon("it was abandoned as it started")
            raise EpisodeFailedError("it was abandoned as it started")
        if not self._unused:
            await self._file.open(episode)
        return await self._next_turn()

    async def _next_turn(self) -> OpenTurn | None:
        assert self._episode is not None
        await self._closing.aclose()
        self._turn = turn = await self._episode.next_turn()
        if turn is None:
            return None
        self._tools = await self._closing.enter_async_context(turn.tools(timeout=self.deadlines.call))
        tools = [Tool(tool.name, tool.description or "", tool.inputSchema or {}) for tool in self._tools.list()]
        if self.task.skills and not framework.has_shell(self._tools) and READ_SKILL not in self._offered():
            tools.append(read_skill_tool())
        listed: list[Any] = list(turn.skills)
        skills = [Skill(skill.name, skill.description, skill.path) for skill in listed]
        brought = tuple(skill for skill in skills if skill.name not in self._known_skills)
        self._known_skills.update(skill.name for skill in brought)
        return OpenTurn(turn.prompt, turn.system_prompt, tuple(tools), brought)

    async def _finished(self) -> dict[str, float]:
        assert self._episode is not None
        while self._turn is not None:
            await self._check_envs()
            await framework.end_turn(self._turn, None)
            await self._next_turn()
        scores = await framework.scores_of(self._episode, self.task.prepared.task)
        status, why = framework.run_status(self._episode)
        if status is not framework.RunStatus.COMPLETED:
            raise EpisodeFailedError(f"a step failed without stopping the run: {why}")
        return scores

    async def _answer(self, call: Call) -> Answer:
        """`call`'s answer. A tool that can't be called, or runs out of time, is an error the model reads; a sandbox
        that died under it is not."""
        if call.problem is not None:
            return Answer.error(call.problem)
        if call.name == READ_SKILL and READ_SKILL not in self._offered():
            return await asyncio.to_thread(self._skill_file, call)
        seconds = self.deadlines.call
        return await self._bounded(self._called(call), seconds + _ANSWER_SECONDS, f"for {call.name} to answer")

    async def _called(self, call: Call) -> Answer:
        assert self._tools is not None
        seconds, begun = self.deadlines.call, asyncio.get_running_loop().time()
        result = await framework.call_tool(self._tools, call.name, dict(call.arguments), seconds=seconds)
        self._overran |= asyncio.get_running_loop().time() - begun >= seconds
        if result.isError:
            await self._check_envs()
        return Answer(result.content, is_error=result.isError)

    def _skill_file(self, call: Call) -> Answer:
        name, path = str(call.arguments.get("skill")), str(call.arguments.get("path") or "SKILL.md")
        try:
            text = framework.read_skill(self.task.prepared.task, self.task.agent, name, path)
        except LookupError as error:
            return Answer.error(str(error.args[0]))
        return Answer([{"type": "text", "text": text}])

    def _offered(self) -> set[str]:
        """The names of the tools that the turn itself offers."""
        return {tool.name for tool in self._tools.list()} if self._tools is not None else set()

    async def _check_envs(self) -> None:
        """Raise EpisodeFailedError where a sandbox is gone: what its tools or verifiers say is about nothing then."""
        assert self._episode is not None
        dead = await framework.dead_envs(self._episode)
        if dead:
            raise EpisodeFailedError(f"the sandbox of env {', '.join(map(repr, dead))} died")

    def _open_turn(self) -> framework.Turn:
        if self._turn is None or self._over:
            raise self._failure or EpisodeFailedError(f"{self._name}: no turn is open")
        return self._turn

    async def _bounded(self, doing: Awaitable[_T], seconds: float, what: str) -> _T:
        """`doing`'s result. Whatever stops it, a cancellation included, first ends the run."""
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                return await doing
        except asyncio.CancelledError:
            await self.abandon("the rollout was cancelled")
            raise
        except Exception as error:  # a run fails with whatever its steps raise
            late = EpisodeTimeoutError(f"it took more than {seconds:g} s {what}")
            raise await self._failed(late if deadline.expired() else error) from error

    async def _failed(self, error: Exception) -> EpisodeFailedError:
        """End the run as failed, and return what to raise for it: the step that failed, where one did.

        What fails as a consequence, such as a call beside the one that failed first, raises the same.
        """
        if self._failure is None:
            kind = EpisodeTimeoutError if isinstance(error, EpisodeTimeoutError) else EpisodeFailedError
            self._failure = kind(f"{self._name}: {self._why(error)}")
        await self._end(framework.RunStatus.FAILED, str(self._failure))
        return self._failure

    def _why(self, error: Exception) -> str:
        """What made the run fail: ours to say, or the step that failed, or the sandbox that is gone."""
        if self._episode is not None and not isinstance(error, EpisodeFailedError):
            if step := framework.failed_step(self._episode):
                return step
            if framework.is_lost_agent(error):
                return f"the sandbox of agent {self.task.agent!r} died: {described(error)}"
        return described(error)

    async def _end(self, status: framework.RunStatus, why: str) -> None:
        self._over = True
        if self._ending is None:
            self._ending = asyncio.create_task(self._torn_down(status, why))
        await _to_its_end(self._ending)

    async def _torn_down(self, status: framework.RunStatus, why: str | None) -> None:
        try:
            if self._episode is not None:
                await self._episode.abandon(why or "")
                if status is framework.RunStatus.CANCELED:  # unless it had ended by itself, unnoticed
                    status, why = framework.ended(self._episode) or (status, why)
        finally:
            await self._settle(status, why)

    async def _settle(self, status: framework.RunStatus, error: str | None) -> None:
        """Give back what the run held, and file how it ended."""
        global _played
        _played += not self._unused
        self._over = True
        self._stop_expiry()
        # an unused run that reached its first turn was set up and no more
        ready = self._early is not None and self._early.done() and not self._early.cancelled()
        went_well = ready if self._unused else status is framework.RunStatus.COMPLETED
        self._turn = None
        if self._slot is not None:
            self._slot.give_back()
            self._slot = None
        _live.discard(self)
        if self._episode is not None:
            verdicts.tell(framework.sandbox_ids(self._episode), went_well=went_well and not self._overran)
        await self._closing.aclose()
        if self._episode is not None:
            await self._file.close(self._episode, status, error)

    @property
    def _name(self) -> str:
        return f"task {self.task.name!r}" + (f" (run {self._episode.id})" if self._episode is not None else "")


def episodes_played() -> tuple[int, int]:
    """How many episodes of this process are over, and how many are under way; none that started ahead, unused.

    Any thread may ask.
    """
    return _played, sum(not run._unused for run in tuple(_live))


async def abandon_all(reason: str, *, seconds: float, on_progress: Callable[[int], None] = lambda left: None) -> int:
    """Abandon every episode of this event loop, within `seconds`, and return how many are still not torn down."""
    runs = list(_live)
    if not runs:
        return 0
    on_progress(len(runs))
    abandoning = [asyncio.create_task(run.abandon(reason)) for run in runs]
    _, pending = await asyncio.wait(abandoning, timeout=seconds)
    return len(pending)


async def _to_its_end(task: asyncio.Task[None]) -> None:
    """Wait for `task` whatever happens, then let a cancellation that came meanwhile go on."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
            if task.cancelled():
                break
    if cancelled:
        raise asyncio.CancelledError
    task.result()
