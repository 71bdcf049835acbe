"""What an episode costs on the warm pool, beside the framework's own local provider and its OpenEnv server.

    python bench/pool.py [--rounds 5] [--at-once 8]

All play the same GridSim days with the same call and must score them the same, or the benchmark fails. Rounds of the
peers alternate, so that what else the machine does is in all of them; a ratio is of the medians. A peer's first round,
in which the pool starts its containers, is a column of its own; so is a longer run of as many at once and no pause, in
which the pool's resets are. A group that starts ahead is the pool's alone.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import uvicorn
from agent_env.a2a_agent import protocol
from agent_env.openenv import build_app
from agent_env.store.routing import namespace_routing
from agent_env.task import EpisodeSpec
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.mcp_client import MCPToolClient

import docker
from agentenv_tinker.bundle import PlayableTask, PlayRule, playable
from agentenv_tinker.conversation import Call
from agentenv_tinker.episode import EpisodeRun
from agentenv_tinker.sandboxes.provider import the_pool

BUNDLE = Path(__file__).resolve().parents[1] / "bundles" / "gridsim"
SPLIT = "held_out"
IDLE_SCORE = 0.2  # what a day without a trade earns, by the bundle's rule
WARM_UP_SECONDS = 15.0
SUSTAINED = 3
LOCAL = "local provider"
BEGUN = time.monotonic()
CERTIFICATES = Path("/etc/ssl/certs")  # a folder of which an HTTP client reads what it needs, as in the stack
THEIR_POLL = protocol.poll_a2a_task  # before `playable` puts ours in its place, which only our own end of a turn wakes
RULE = PlayRule(reward=None, trainer_agents=(), skills="show", turn_seconds=600, sandbox_seconds=3600)


@dataclass(frozen=True)
class Played:
    """One episode's score, and in seconds how long its start and its end took."""

    score: float
    start: float
    end: float


Play = Callable[[int], Awaitable[Played]]


@dataclass
class Peer:
    """Somebody who plays, and what their rounds measured."""

    name: str
    play: Play
    per_episode: list[float] = field(default_factory=list)
    """Seconds of a round, by its number of episodes."""
    starts_alone: list[float] = field(default_factory=list)
    ends_alone: list[float] = field(default_factory=list)
    sustained: float = math.nan
    """Seconds an episode, of `SUSTAINED` times as many as are at once."""
    starts_ahead: list[float] = field(default_factory=list)
    """From a group's start to each first turn, where the group's episodes were started ahead."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("a2a").setLevel(logging.ERROR)  # warns of each agent card that the framework asks for
    if any(CERTIFICATES.glob("*.0")):  # for every peer alike
        os.environ["SSL_CERT_DIR"] = str(CERTIFICATES)
        os.environ.pop("SSL_CERT_FILE", None)
    if options.serve is not None:
        uvicorn.run(build_app(BUNDLE, sandbox="local"), host="127.0.0.1", port=options.serve, log_level="error")
        return
    with openenv_server() as url:
        asyncio.run(bench(url, rounds=options.rounds, at_once=options.at_once))


async def bench(url: str, *, rounds: int, at_once: int) -> None:
    tasks = (await asyncio.to_thread(playable, str(BUNDLE), rule=RULE, sandbox="pool")).split(SPLIT)
    days = [holds(task.name) for task in tasks[:at_once]]
    ours = lambda index: play_ours(tasks[index], days[index], sandbox="pool")  # noqa: E731
    peers = [
        Peer("the pool", ours),
        Peer(LOCAL, lambda index: play_framework(tasks[index], days[index])),
        Peer("OpenEnv server", lambda index: play_openenv(url, index, days[index])),
    ]
    for number in range(1 + rounds):
        for peer in peers:
            progress(f"round {number} of {rounds}: {peer.name}")
            with polling(peer):
                await measure(peer, at_once=at_once)
    for peer in peers:
        progress(f"{SUSTAINED * at_once} episodes without a pause: {peer.name}")
        with polling(peer):
            await measure_sustained(peer, at_once=at_once)
    for number in range(rounds):
        progress(f"a group started ahead, {number + 1} of {rounds}")
        peers[0].starts_ahead += await start_ahead(tasks[:at_once])
    once = Peer("the pool, RECYCLE=0", ours)
    async with recycling("0"):
        for number in range(1 + rounds):
            progress(f"round {number} of {rounds}: {once.name}")
            await measure(once, at_once=at_once)
        progress(f"{SUSTAINED * at_once} episodes without a pause: {once.name}")
        await measure_sustained(once, at_once=at_once)
    report([*peers, once], rounds=rounds, at_once=at_once)


def progress(what: str) -> None:
    print(f"{time.monotonic() - BEGUN:5.0f} s  {what}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def polling(peer: Peer) -> Iterator[None]:
    """The block plays by the peer's own way to wait for the end of a turn."""
    ours = protocol.poll_a2a_task
    if peer.name == LOCAL:
        protocol.poll_a2a_task = THEIR_POLL
    try:
        yield
    finally:
        protocol.poll_a2a_task = ours


async def measure(peer: Peer, *, at_once: int) -> None:
    """A round of `at_once` episodes, and one alone. Containers that start ahead get some time in between, as a model
    that samples gives it."""
    begun = time.perf_counter()
    played = await asyncio.gather(*(peer.play(index) for index in range(at_once)))
    peer.per_episode.append((time.perf_counter() - begun) / at_once)
    await asyncio.sleep(WARM_UP_SECONDS if "pool" in peer.name else 0)
    alone = await peer.play(0)
    peer.starts_alone.append(alone.start)
    peer.ends_alone.append(alone.end)
    check(peer, [*played, alone])


async def measure_sustained(peer: Peer, *, at_once: int) -> None:
    """`at_once` players, each of whom plays one episode after the other."""

    async def player(index: int) -> list[Played]:
        return [await peer.play(index) for _ in range(SUSTAINED)]

    begun = time.perf_counter()
    played = await asyncio.gather(*(player(index) for index in range(at_once)))
    peer.sustained = (time.perf_counter() - begun) / (at_once * SUSTAINED)
    check(peer, [each for plays in played for each in plays])


async def start_ahead(tasks: Sequence[PlayableTask]) -> list[float]:
    """The seconds from the start of a group, all of which was started ahead a while ago, to each of its first turns."""
    runs = [EpisodeRun(task, "pool", "bench", 1000) for task in tasks]
    for run in runs:
        run.start_ahead()
    await asyncio.sleep(WARM_UP_SECONDS)
    begun = time.perf_counter()

    async def first_turn(run: EpisodeRun) -> float:
        if not await run.claim():
            raise SystemExit("an episode that was started ahead can't be used: no figure is valid")
        await run.start()
        return time.perf_counter() - begun

    seconds = await asyncio.gather(*map(first_turn, runs))
    await asyncio.gather(*(run.abandon("it was only started") for run in runs))
    return seconds


def check(peer: Peer, played: list[Played]) -> None:
    """Raise SystemExit where an episode scored what it must not."""
    wrong = [each.score for each in played if not math.isclose(each.score, IDLE_SCORE, abs_tol=1e-5)]
    if wrong:
        raise SystemExit(f"{peer.name}: a day without a trade scored {wrong}, not {IDLE_SCORE}: no figure is valid")


async def play_ours(task: PlayableTask, schedule: str, *, sandbox: str) -> Played:
    run = EpisodeRun(task, sandbox, "bench", 1000)
    begun = time.perf_counter()
    await run.start()
    started = time.perf_counter()
    await run.act([Call("1", "submit_schedule", {"schedule": schedule})], in_order=True)
    replied = time.perf_counter()
    await run.end_turn("Done.")
    [score] = (await run.scores()).values()
    return Played(score, started - begun, time.perf_counter() - replied)


async def play_framework(task: PlayableTask, schedule: str) -> Played:
    spec = EpisodeSpec.from_task(task.prepared.task)
    begun = time.perf_counter()
    with namespace_routing():
        episode = await spec.start(sandbox="local")
        turn = await episode.next_turn()
        started = time.perf_counter()
        assert turn is not None
        async with turn.tools() as tools:
            await tools.call("submit_schedule", {"schedule": schedule})
        replied = time.perf_counter()
        await turn.end("Done.")
        [score] = (await episode.result()).values()
    return Played(score, started - begun, time.perf_counter() - replied)


async def play_openenv(url: str, index: int, schedule: str) -> Played:
    begun = time.perf_counter()
    async with MCPToolClient(base_url=url, message_timeout_s=600) as env:
        await env.reset(split=SPLIT, index=index)
        started = time.perf_counter()
        await env.step(CallToolAction(tool_name="submit_schedule", arguments={"schedule": schedule}))
        replied = time.perf_counter()
        end = await env.step(CallToolAction(tool_name="end_turn", arguments={"response": "Done."}))
        return Played(float(end.reward), started - begun, time.perf_counter() - replied)


def holds(task: str) -> str:
    """The schedule of the task's day that trades nothing."""
    steps = json.loads((BUNDLE / "tasks" / f"{task}.json").read_text())
    [directive] = next(step["directives"] for step in steps if step["id"] == "day")
    return " ".join(["hold"] * len(directive["args"]["prices"]))


@contextlib.asynccontextmanager
async def recycling(value: str) -> AsyncIterator[None]:
    """The block plays on a pool of its own, made with that RECYCLE."""
    (await asyncio.to_thread(the_pool)).close()
    os.environ["RECYCLE"] = value
    try:
        yield
    finally:
        del os.environ["RECYCLE"]
        (await asyncio.to_thread(the_pool)).close()


@contextlib.contextmanager
def openenv_server() -> Iterator[str]:
    """The framework's OpenEnv server in a process of its own: its URL."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(port)])
    try:
        for _ in range(1200):
            if server.poll() is not None:
                raise SystemExit("the OpenEnv server did not start")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def report(peers: list[Peer], *, rounds: int, at_once: int) -> None:
    client = docker.from_env()
    engine = client.version()["Version"]
    client.close()
    names = ("agentenv-framework", "agentenv-tinker", "tinker-cookbook", "openenv")
    print(f"{os.cpu_count()} CPUs ({platform.machine()}), load {os.getloadavg()[1]:.1f}, Python", end=" ")
    print(platform.python_version(), f"Docker {engine}", *(f"{name} {version(name)}" for name in names), sep=", ")
    print(f"\nGridSim, {rounds} rounds; median (least to most); a ratio is a peer's median by the first row's\n")
    print(f"| | s per episode, {at_once} at once | ratio | in the first round | with no pause |", end="")
    print(" alone: start to first turn, s | last reply to reward, s |")
    print("| --- " * 7 + "|")
    for peer in peers:
        first, *later = peer.per_episode
        ratio = statistics.median(later) / statistics.median(peers[0].per_episode[1:])
        alone = [spread(peer.starts_alone[1:]), spread(peer.ends_alone[1:])]
        figures = [spread(later), f"{ratio:.1f}", f"{first:.3f}", f"{peer.sustained:.3f}", *alone]
        print("|", " | ".join([peer.name, *figures]), "|")
    print(f"\nA group of {at_once} that the pool's trainer starts ahead: start to first turn", end=" ")
    print(spread(peers[0].starts_ahead), "s")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
