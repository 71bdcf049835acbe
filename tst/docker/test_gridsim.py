"""GridSim in Docker: the same plays score the same through the Episode API, the OpenEnv server and agent-env run."""

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
import uvicorn
from agent_env.bundle import prepare_bundle
from agent_env.openenv import build_app
from agent_env.store.routing import namespace_routing
from agent_env.task import EpisodeSpec
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.mcp_client import MCPToolClient

REPOSITORY = Path(__file__).resolve().parents[2]
BUNDLE = REPOSITORY / "bundles" / "gridsim"
AGENT = Path(__file__).with_name("gridsim_agent")

PLAYS = {
    "held_out-000": "idle",
    "held_out-001": "best",
    "held_out-002": "losing",
    "held_out-003": "nothing submitted",
    "held_out-004": "malformed, then best",
    "held_out-005": "idle, then best",
}
"""How each task is played."""


def load_battery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("battery", BUNDLE / "envs" / "gridsim" / "battery.py")
    battery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(battery)
    return battery


battery = load_battery()


def task_steps(task):
    return json.loads((BUNDLE / "tasks" / f"{task}.json").read_text())


def day_of(task):
    [directive] = next(step["directives"] for step in task_steps(task) if step["id"] == "day")
    args = directive["args"]
    return battery.Day(tuple(args["prices"]), args["capacity"], args["power"], args["loss"])


def smallest_loss(day):
    """The schedule that loses money, but the least of all that do."""
    losing = (
        words for words in itertools.product(battery.MOVES, repeat=len(day.prices)) if battery.profit(day, words) < 0
    )
    return max(losing, key=lambda words: battery.profit(day, words))


def schedules(task):
    """What a task's play submits, in order."""
    day = day_of(task)
    blocks = len(day.prices)
    best = battery.write_schedule(day, battery.best_schedule(day))
    idle = " ".join(["hold"] * blocks)
    return {
        "idle": [idle],
        "best": [best],
        "losing": [" ".join(smallest_loss(day))],
        "nothing submitted": [],
        "malformed, then best": ["buy", best],
        "idle, then best": [idle, best],
    }[PLAYS[task]]


def expected_score(task):
    """The score by the rule of docs/gridsim.md, from the schedule that counts and the best one."""
    day = day_of(task)
    counting = {"nothing submitted": None, "malformed, then best": 1}.get(PLAYS[task], 0)
    if counting is None:
        return 0.0
    earned = battery.profit(day, battery.parse_schedule(day, schedules(task)[counting]))
    return max(0.0, 0.2 + 0.8 * earned / battery.profit(day, battery.best_schedule(day)))


EXPECTED = pytest.approx({task: expected_score(task) for task in PLAYS}, abs=1e-5)


@pytest.fixture(scope="module")
def workspace():
    """A folder of these tests alone; the images built from its bundles go with it."""
    with tempfile.TemporaryDirectory(prefix="gridsim") as folder:
        yield Path(folder)
        # The framework names a local image after the folder it is built from.
        name = re.sub(r"[^a-z0-9]+", "-", Path(folder).name.lower()).strip("-")
        listed = ["docker", "images", "--filter", f"reference=local/*{name}*", "--format", "{{.Repository}}:{{.Tag}}"]
        if images := subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split():
            subprocess.run(["docker", "rmi", *images], capture_output=True, check=True)


@pytest.fixture(scope="module")
def bundle(workspace):
    """GridSim cut down to the tasks played here."""
    root = workspace / "played" / "gridsim"
    for folder in ("envs", "artifacts"):
        shutil.copytree(BUNDLE / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "tasks").mkdir()
    for task in PLAYS:
        shutil.copy(BUNDLE / "tasks" / f"{task}.json", root / "tasks")
    (root / "evals").mkdir()
    (root / "evals" / "plays.toml").write_text("tasks = " + json.dumps(list(PLAYS)))
    return root


def test_plays_cover_every_kind_of_score():
    """One play scores 0 for want of a schedule, one between 0 and idle, idle, and the best."""
    scores = {PLAYS[task]: round(expected_score(task), 3) for task in PLAYS}
    assert 0 < scores.pop("losing") < 0.2
    assert scores == {
        "idle": 0.2,
        "best": 1.0,
        "nothing submitted": 0.0,
        "malformed, then best": 1.0,
        "idle, then best": 0.2,
    }


async def play_episode(task, spec):
    episode = await spec.start(sandbox="local")
    try:
        turn = await episode.next_turn()
        async with turn.tools() as tools:
            await tools.call("read_day", {})
            for schedule in schedules(task):
                await tools.call("submit_schedule", {"schedule": schedule})
        await turn.end("Done.")
        return (await episode.result())["profit"]
    finally:
        await episode.abandon("the test is over")


async def test_episode_api(bundle):
    """Played through the Episode API, each play scores what the rule says."""
    with namespace_routing():
        prepared = await asyncio.to_thread(prepare_bundle, bundle, evals=["plays"], played=True, sandbox="local")
        specs = {entry.name: EpisodeSpec.from_task(task) for entry, task in prepared.tasks}
        scores = await asyncio.gather(*(play_episode(task, specs[task]) for task in PLAYS))
    assert dict(zip(PLAYS, scores, strict=True)) == EXPECTED


@contextlib.contextmanager
def serving(app):
    """The app on a free port of this machine: its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


async def play_openenv(url, index, task):
    async with MCPToolClient(base_url=url, message_timeout_s=300) as env:
        await env.reset(split="plays", index=index)
        await env.step(CallToolAction(tool_name="read_day", arguments={}))
        for schedule in schedules(task):
            await env.step(CallToolAction(tool_name="submit_schedule", arguments={"schedule": schedule}))
        end = await env.step(CallToolAction(tool_name="end_turn", arguments={"response": "Done."}))
        return end.reward


async def test_openenv_server(bundle):
    """Played by an OpenEnv client of the framework's server, each play is rewarded with the same score."""
    app = await asyncio.to_thread(build_app, bundle, sandbox="local")
    with serving(app) as url:
        rewards = await asyncio.gather(*(play_openenv(url, index, task) for index, task in enumerate(PLAYS)))
    assert dict(zip(PLAYS, rewards, strict=True)) == EXPECTED


@pytest.fixture
def bundle_with_agent(bundle, workspace):
    """The same bundle with the scripted agent in it, which knows each day by its reading."""
    root = workspace / "run" / "gridsim"
    shutil.copytree(bundle, root)
    shutil.copytree(AGENT, root / "agents" / "scripted", ignore=shutil.ignore_patterns("__pycache__"))
    scripts = {battery.describe(day_of(task)): schedules(task) for task in PLAYS}
    (root / "agents" / "scripted" / "scripts.json").write_text(json.dumps(scripts))
    return root


def test_agent_env_run(bundle_with_agent):
    """Run by the framework itself with an agent that plays them, each play scores the same."""
    # The framework asks for a model endpoint before it deploys any agent; this one has no model to call.
    no_model = {"LITELLM_BASE_URL": "http://unused.invalid", "LITELLM_API_KEY": "unused"}
    command = [sys.executable, "-m", "agent_env.cli", "run", bundle_with_agent, "--agent", "scripted"]
    run = subprocess.run(
        [*command, "--sandbox", "local"],
        env={**os.environ, **no_model},
        capture_output=True,
        text=True,
        timeout=600,
    )
    scores = re.findall(r"^\s+tasks/(\S+)\.json v\d+: .*\(profit: ([0-9.]+)\)", run.stdout, re.MULTILINE)
    assert {task: float(score) for task, score in scores} == EXPECTED, run.stdout + run.stderr
