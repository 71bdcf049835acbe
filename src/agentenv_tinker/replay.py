"""Replays demonstrations as rollouts, and keeps those that score well as supervised data.

The scripted messages take the way of sampled ones, through the same env, renderer and data assembly, so that what a
warm start is taught is what RL goes on with, token by token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.renderers import Message, Renderer, ToolCall, TrainOnWhat
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.types import InitialObservationOverflow, Trajectory, Transition

from agentenv_tinker import framework
from agentenv_tinker.dataset import EpisodeGroupBuilder, PlaySettings
from agentenv_tinker.demonstrations import DemonstratedCall, DemonstratedTurn, Demonstration, demonstration_line
from agentenv_tinker.errors import BundleError, EpisodeFailedError
from agentenv_tinker.rollout import RolloutEnv

_TRIES = 3  # of a demonstration whose episode fails, as rollouts that fail are tried again
PART = "warm-start"  # of the run group that replayed episodes are filed under


@dataclass(frozen=True)
class Example:
    """A conversation to learn from."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    """1.0 for each token that the model would have written, 0.0 for the others; as many as `tokens`."""

    def datum(self) -> tinker.Datum:
        """The example for the loss `cross_entropy`: each token but the first is a target."""
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(self.tokens[:-1])),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(
                    data=list(self.tokens[1:]), dtype="int64", shape=[len(self.tokens) - 1]
                ),
                "weights": tinker.TensorData(
                    data=list(self.weights[1:]), dtype="float32", shape=[len(self.tokens) - 1]
                ),
            },
        )


@dataclass(frozen=True)
class Replayed:
    """What replaying a demonstration came to."""

    line: str
    """The demonstration, as the line of its file."""
    task: str
    reward: float | None
    """None for a demonstration that failed."""
    examples: tuple[Example, ...]
    """One, or more where the renderer rewrites what came before."""
    error: str = ""
    """Why it failed."""

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON has them."""
        examples = [{"tokens": each.tokens, "weights": each.weights} for each in self.examples]
        return {**vars(self), "examples": examples}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Replayed:
        """What `to_dict` gave, read again."""
        examples = tuple(Example(tuple(each["tokens"]), tuple(each["weights"])) for each in value["examples"])
        return cls(**{**value, "examples": examples})


def recorded_demonstrations(bundle: str) -> Iterator[Demonstration]:
    """What the framework's records have of completed runs of a bundle's tasks, each way of playing a task once.

    Blocks. Raises BundleError for a bundle that can't be read.
    """
    known: set[str] = set()
    try:
        for task, turns in framework.recorded_runs(bundle):
            demonstration = Demonstration(task, tuple(map(_demonstrated, turns)))
            if (line := demonstration_line(demonstration)) not in known:
                known.add(line)
                yield demonstration
    except framework.FrameworkBundleError as error:
        raise BundleError("\n".join(f"bundle {bundle!r}: {problem}" for problem in error.problems)) from error


def _demonstrated(turn: framework.RecordedTurn) -> DemonstratedTurn:
    return DemonstratedTurn(tuple(DemonstratedCall(*call) for call in turn.calls), turn.reply)


async def of_split(demonstrations: Sequence[Demonstration], settings: PlaySettings, split: str) -> list[Demonstration]:
    """Those demonstrations that are of tasks of `split`, in their order. Raises BundleError where there are none."""
    tasks = {task.name for task in (await asyncio.to_thread(settings.playable)).split(split)}
    chosen = [one for one in demonstrations if one.task in tasks]
    if not chosen:
        raise BundleError(f"no demonstration is of a task of split {split!r}")
    return chosen


async def replay(
    demonstrations: Sequence[Demonstration],
    settings: PlaySettings,
    split: str,
    *,
    on_replayed: Callable[[Replayed], object] = lambda replayed: None,
) -> list[Replayed]:
    """Replay demonstrations, each of a task of `split`, in their order. `on_replayed` is given each as it ends."""
    tasks = {task.name: index for index, task in enumerate((await asyncio.to_thread(settings.playable)).split(split))}

    async def one(demonstration: Demonstration) -> Replayed:
        replayed = await _replayed(demonstration, settings, split, tasks[demonstration.task])
        on_replayed(replayed)
        return replayed

    async with asyncio.TaskGroup() as group:
        replaying = [group.create_task(one(demonstration)) for demonstration in demonstrations]
    return [each.result() for each in replaying]


async def _replayed(demonstration: Demonstration, settings: PlaySettings, split: str, index: int) -> Replayed:
    """What replaying `demonstration` came to, tried again where it failed."""
    for _ in range(_TRIES):
        replayed = await _replayed_once(demonstration, settings, split, index)
        if replayed.reward is not None:
            break
    return replayed


async def _replayed_once(demonstration: Demonstration, settings: PlaySettings, split: str, index: int) -> Replayed:
    group = EpisodeGroupBuilder(settings, split, index=index, size=1, part=PART, step=0)
    line = demonstration_line(demonstration)
    try:
        [env] = await group.make_envs()
        assert isinstance(env, RolloutEnv)
        trajectory = await _trajectory(env, demonstration)
        [(late, _)] = await group.compute_group_rewards([trajectory], [env])
        reward = sum(transition.reward for transition in trajectory.transitions) + late
        return Replayed(line, demonstration.task, reward, tuple(_examples(trajectory)))
    except EpisodeFailedError as error:
        return Replayed(line, demonstration.task, None, (), str(error))
    finally:
        await group.cleanup()


async def _trajectory(env: RolloutEnv, demonstration: Demonstration) -> Trajectory:
    """The rollout of `demonstration`. Raises EpisodeFailedError where the episode doesn't go as it says."""
    observed = await env.initial_observation()
    if isinstance(observed, InitialObservationOverflow):
        raise EpisodeFailedError("its first prompt is over the token limit")
    observation, _ = observed
    transitions: list[Transition] = []
    messages = list(_messages(demonstration))
    for message in messages:
        action = await asyncio.to_thread(action_tokens, env.renderer, env.episode.messages, message, observation)
        result = await env.step(action)
        transitions.append(
            Transition(
                ob=observation,
                ac=TokensWithLogprobs(tokens=action, maybe_logprobs=[0.0] * len(action)),
                reward=result.reward,
                episode_done=result.episode_done,
                metrics=result.metrics,
            )
        )
        observation = result.next_observation
        if result.episode_done:
            break
    if not transitions[-1].episode_done:
        raise EpisodeFailedError("the episode has more turns than the demonstration")
    if len(transitions) < len(messages):
        raise EpisodeFailedError("the episode was over before the demonstration was")
    return Trajectory(transitions=transitions, final_ob=observation)


def _messages(demonstration: Demonstration) -> Iterator[Message]:
    """What the model says in it: a message for each call, and one that ends each turn."""
    for turn in demonstration.turns:
        for call in turn.calls:
            yield Message(role="assistant", content="", tool_calls=[_tool_call(call)])
        yield Message(role="assistant", content=turn.reply)


def _tool_call(call: DemonstratedCall) -> ToolCall:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return ToolCall(function=ToolCall.FunctionBody(name=call.name, arguments=arguments))


def action_tokens(
    renderer: Renderer, conversation: Sequence[Message], message: Message, prompt: tinker.ModelInput
) -> list[int]:
    """The tokens by which a model would write `message` after `prompt`, which renders `conversation`.

    Raises EpisodeFailedError where the renderer writes the conversation otherwise once it has the message.
    """
    written, _ = renderer.build_supervised_example([*conversation, message], TrainOnWhat.LAST_ASSISTANT_MESSAGE)
    before, after = prompt.to_ints(), written.to_ints()
    if after[: len(before)] != before:
        raise EpisodeFailedError(f"renderer {type(renderer).__name__} writes a conversation anew after each message")
    return after[len(before) :]


def _examples(trajectory: Trajectory) -> Iterator[Example]:
    """The trajectory as RL assembles it, with its action mask as weights."""
    for datum in trajectory_to_data(trajectory, 1.0):
        inputs = datum.loss_fn_inputs
        tokens = (*datum.model_input.to_ints()[:1], *inputs["target_tokens"].data)
        yield Example(tuple(map(int, tokens)), (0.0, *map(float, inputs["mask"].data)))


def write_replayed(path: Path, replayed: Iterable[Replayed], *, mode: Literal["a", "w"] = "a") -> None:
    """Write replayed demonstrations, or add them, to the file at `path`, a JSON line each. Blocks."""
    with path.open(mode) as file:
        file.writelines(json.dumps(each.to_dict()) + "\n" for each in replayed)


def read_replayed(path: Path) -> list[Replayed]:
    """What `write_replayed` left at `path`, but for a last line that a kill cut short. Blocks."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Replayed.from_dict(json.loads(line)) for line in lines]
