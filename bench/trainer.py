"""What the trainer itself costs a rollout: beside the cookbook's own tool env, and in memory.

    python bench/trainer.py [--rounds 9] [--at-once 32] [--episodes 256] [--rollouts 1000]

The first table plays the same conversation through `RolloutEnv`, over an episode that answers from memory, and through
the cookbook's `AgentToolMessageEnv` with the same tools in memory, with one scripted sampler and renderer. Both must
earn the same reward by as many messages. Rounds of the two alternate; a ratio is of the medians.

The second holds as many episodes of the framework open at once as `--episodes` says, on the tests' in-process sandboxes
(servers, agent proxies and all), and then plays `--rollouts` in batches of 32: resident memory may not grow.
"""

import argparse
import asyncio
import gc
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.message_env import EnvFromMessageEnv
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Env
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import AgentToolMessageEnv, tool

from agentenv_tinker.conversation import Answer, Call, Tool
from agentenv_tinker.env import EpisodeEnv, RolloutRules
from agentenv_tinker.episode import OpenTurn
from agentenv_tinker.rollout import RolloutEnv

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tst" / "tinker"))

from stand_in.bundles import task, write_bundle
from stand_in.model import MODEL, RENDERER, Script, call, register
from stand_in.play import builder

REPLIES = (call("read"), call("note", text="a plan of some words"), call("read"), "Done.")
CONFIG = '[sandbox.providers.in_process]\nimpl = "stand_in.sandbox:InProcessProvider"\n'
SCORE = 0.5
PROMPT = "Read the desk, note a plan, read it again, and say when you are done. " * 8
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = (Tool("note", "Note a text.", SCHEMA), Tool("read", "Read the notes.", {"type": "object", "properties": {}}))


class MemoryRun:
    """An episode that answers at once: what `EpisodeEnv` asks of an `EpisodeRun`."""

    over = False

    def __init__(self) -> None:
        self._notes: list[str] = []
        self.labels = {"task": "one", "task_id": "one", "run": "none"}

    async def start(self) -> OpenTurn:
        return OpenTurn(prompt=PROMPT, system_prompt=None, tools=TOOLS, skills=())

    async def record(self, message: dict[str, Any], *, model: str | None) -> None:
        pass

    async def act(self, calls: Sequence[Call], *, in_order: bool) -> list[Answer]:
        return [Answer([{"type": "text", "text": self._answer(each)}]) for each in calls]

    def _answer(self, asked: Call) -> str:
        if asked.name == "read":
            return "\n".join(self._notes)
        self._notes.append(str(asked.arguments["text"]))
        return "noted"

    async def end_turn(self, reply: str | None, *, within: float | None = None) -> None:
        self.over = True

    async def scores(self, *, within: float | None = None) -> dict[str, float]:
        return {"score": SCORE}

    async def abandon(self, reason: str) -> None:
        self.over = True


def ours() -> Env:
    renderer = get_renderer(RENDERER, get_tokenizer(MODEL), model_name=MODEL)
    return RolloutEnv(EpisodeEnv(MemoryRun(), renderer, lambda scores: scores["score"], RolloutRules()))  # type: ignore[arg-type]


class Desk:
    """The same tools, as the cookbook's."""

    def __init__(self) -> None:
        self._notes: list[str] = []

    @tool
    async def note(self, text: str) -> str:
        """Note a text."""
        self._notes.append(text)
        return "noted"

    @tool
    async def read(self) -> str:
        """Read the notes."""
        return "\n".join(self._notes)


def theirs() -> Env:
    async def reward(history: list[Any]) -> tuple[float, dict[str, float]]:
        return SCORE, {}

    desk = Desk()
    renderer = get_renderer(RENDERER, get_tokenizer(MODEL), model_name=MODEL)
    specs = [desk.note.to_spec(), desk.read.to_spec()]
    opening = renderer.create_conversation_prefix_with_tools(specs, "")
    env = AgentToolMessageEnv(
        tools=[desk.note, desk.read],
        initial_messages=[*opening, {"role": "user", "content": PROMPT}],
        max_turns=8,
        reward_fn=reward,
    )
    return EnvFromMessageEnv(renderer, env)


async def seconds_a_rollout(make: Callable[[], Env], at_once: int) -> float:
    """Of a batch of `at_once`. Raises SystemExit where a rollout isn't the one that both are to play."""
    policy = Script(*REPLIES)
    begun = time.perf_counter()
    played = await asyncio.gather(*(run_rollout(policy, make()) for _ in range(at_once)))
    seconds = (time.perf_counter() - begun) / at_once
    for trajectory in played:
        reward = sum(step.reward for step in trajectory.transitions)
        if (reward, len(trajectory.transitions)) != (SCORE, len(REPLIES)):
            raise SystemExit(f"{make.__name__}: {reward} by {len(trajectory.transitions)} messages: no figure is valid")
    return seconds


async def overhead(*, rounds: int, at_once: int) -> None:
    peers: dict[Callable[[], Env], list[float]] = {ours: [], theirs: []}
    for _ in range(1 + rounds):  # the first warms up
        for make, measured in peers.items():
            gc.collect()
            measured.append(await seconds_a_rollout(make, at_once))
    medians = {make: statistics.median(measured[1:]) for make, measured in peers.items()}
    print(f"\n{at_once} rollouts at once, {rounds} rounds | ms a rollout (least to most) | rollouts/s")
    for make, name in ((ours, "RolloutEnv"), (theirs, "AgentToolMessageEnv")):
        spread = f"{1e3 * min(peers[make][1:]):.2f} to {1e3 * max(peers[make][1:]):.2f}"
        print(f"{name:<38} | {1e3 * medians[make]:.2f} ({spread}) | {1 / medians[make]:.0f}")
    print(f"ratio {medians[ours] / medians[theirs]:.2f} (to reach: 1.5 or less, and 100 rollouts/s)")


async def memory(*, episodes: int, rollouts: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (config := Path(folder) / "config.toml").write_text(CONFIG)
        os.environ |= {"AGENT_ENV_CONFIG": str(config), "XDG_STATE_HOME": folder}
        bundle = write_bundle(Path(folder) / "b", {"one": task("Go.")})
        await played(bundle, 32)
        before = resident()
        held = await opened(bundle, episodes)
        each = (resident() - before) / episodes
        await asyncio.gather(*(env.abandon("it was only opened") for env in held))
        print(f"\n{episodes} episodes open at once: {each / 1e6:.1f} MB each (to reach: 8 or less)")
        await played(bundle, 96)
        sizes = [resident()]
        for _ in range(4):
            await played(bundle, rollouts // 4)
            sizes.append(resident())
        print(
            f"after each quarter of {rollouts} rollouts: {', '.join(f'{size / 1e6:.0f}' for size in sizes)} MB resident"
        )


async def opened(bundle: str, count: int) -> list[RolloutEnv]:
    """So many episodes, each at its first turn."""
    settings = {"group_size": count, "max_concurrent_episodes": count}
    train, _ = await builder(bundle, **settings)()
    envs = await train.get_batch(0)[0].make_envs()
    await asyncio.gather(*(env.initial_observation() for env in envs))
    return [env for env in envs if isinstance(env, RolloutEnv)]


async def played(bundle: str, count: int) -> None:
    """So many rollouts, 32 at once."""
    for _ in range(-(-count // 32)):
        train, _ = await builder(bundle, group_size=32, max_concurrent_episodes=32)()
        group = train.get_batch(0)[0]
        envs = await group.make_envs()
        trajectories = await asyncio.gather(*(run_rollout(Script("done"), env) for env in envs))
        await group.compute_group_rewards(list(trajectories), envs)
        await group.cleanup()
    gc.collect()


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def bench(options: argparse.Namespace) -> None:
    names = ("tinker-cookbook", "agentenv-framework")
    print(f"{platform.machine()}, Python {platform.python_version()}, {', '.join(f'{n} {version(n)}' for n in names)}")
    await overhead(rounds=options.rounds, at_once=options.at_once)
    if options.episodes:
        await memory(episodes=options.episodes, rollouts=options.rollouts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--rollouts", type=int, default=1000)
    logging.disable(logging.CRITICAL)  # the servers' own
    register()
    asyncio.run(bench(parser.parse_args()))


if __name__ == "__main__":
    main()
