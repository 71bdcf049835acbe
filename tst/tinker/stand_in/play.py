"""Plays a bundle's tasks as the cookbook does, with a scripted model."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from agent_env.config import get_config
from agent_env.runner import store as run_index
from agent_env.runner.runner import RunRecord
from agent_env.store.routing import namespace_routing
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Metrics, Trajectory

from agentenv_tinker.dataset import AgentEnvDatasetBuilder, EpisodeGroupBuilder
from agentenv_tinker.rollout import RolloutEnv
from stand_in.model import MODEL, RENDERER


def builder(bundle: str, **settings: Any) -> AgentEnvDatasetBuilder:
    """A dataset of `bundle` on the stand-ins, one rollout a group unless `settings` says otherwise."""
    defaults = {
        "run_name": "run",
        "model_name": MODEL,
        "renderer_name": RENDERER,
        "sandbox": "in_process",
        "group_size": 1,
        "groups_per_batch": 1,
    }
    return AgentEnvDatasetBuilder(bundle=bundle, **{**defaults, **settings})


async def group(bundle: str, **settings: Any) -> EpisodeGroupBuilder:
    """The first group of the dataset."""
    train, _ = await builder(bundle, **settings)()
    return train.get_batch(0)[0]


@dataclass(frozen=True)
class Played:
    """A rollout that was played to its end."""

    trajectory: Trajectory
    env: RolloutEnv
    late: tuple[float, Metrics]
    """What its group adds to it."""

    @property
    def reward(self) -> float:
        return round(sum(step.reward for step in self.trajectory.transitions) + self.late[0], 9)

    @property
    def metrics(self) -> Metrics:
        """Of the last step, and what the group adds."""
        return {**self.trajectory.transitions[-1].metrics, **self.late[1]}

    @property
    def messages(self) -> list[Message]:
        return self.env.episode.messages

    @property
    def conversation(self) -> list[tuple[str, Any]]:
        """The messages as (role, content), the prefix with the tools left out."""
        return [(message["role"], message["content"]) for message in self.messages[1:]]

    @property
    def answers(self) -> list[Any]:
        """What the tools answered, as the model reads it."""
        return [message["content"] for message in self.messages if message["role"] == "tool"]

    @property
    def record(self) -> RunRecord:
        """The run as the framework's run index has it."""
        return recorded(self.env)

    @property
    def trajectory_record(self) -> list[tuple[str, Any]]:
        """What the run's record has of its first turn, in order: each span's name and what came of it."""
        response = self.env.episode.run._episode._context.prompt_responses[0]
        with namespace_routing():
            store = get_config().get_object_store_at(response.agent_trajectory_object_url)
            spans = json.loads(store.get(response.agent_trajectory_object_url))
        return [(span["name"], json.loads(span["attributes"]["gen_ai.completion"])) for span in spans]


def recorded(env: RolloutEnv) -> RunRecord:
    """An env's run as the framework's run index has it."""
    with namespace_routing():
        found = run_index.get_run(env.episode.run._episode.id)
    assert found is not None
    return found


def runs_of(run_name: str) -> list[RunRecord]:
    """The run index's entries under `run_name`, the newest first."""
    with namespace_routing():
        runs = run_index.list_runs(limit=1000)
    return [run for run in runs if run.overrides["metadata"]["run_group_id"].startswith(f"{run_name}/")]


async def play(bundle: str, policy: TokenCompleter, *, runner: Any = None, **settings: Any) -> Played:
    """Play the first task of the dataset to its end; `runner` is what the cookbook's rollout runner is given."""
    builder = await group(bundle, **settings)
    [env] = await builder.make_envs()
    try:
        rollout = asyncio.create_task(run_rollout(policy, env, **(runner or {})))
        trajectory = await rollout
        [late] = await builder.compute_group_rewards([trajectory], [env])
    finally:
        await builder.cleanup()
    return Played(trajectory, env, late)
