"""The warm pool in Docker: an episode on it is as one in a fresh container, whatever those before it left or broke."""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

import docker
from agentenv_tinker import framework
from agentenv_tinker.bundle import PlayRule, playable
from agentenv_tinker.conversation import Call
from agentenv_tinker.episode import Deadlines, EpisodeRun
from agentenv_tinker.errors import EpisodeFailedError, SandboxError
from agentenv_tinker.sandboxes.host import PREFIX, Host, Spec
from agentenv_tinker.sandboxes.owner import OWNER_LABEL, Owners
from agentenv_tinker.sandboxes.pool import Pool
from agentenv_tinker.sandboxes.provider import the_pool

NOTEBOOK = Path(__file__).with_name("pool_env")
KINDS = ("honest", "plain", "dirty", "liar", "crasher", "raiser", "leaky", "slow", "sleeper")
EPISODES = int(os.environ.get("POOL_EPISODES", "40"))
SCORES = """
from agentenv_protocol.client import get_data

async def verify(mcp_url):
    answer = await get_data(mcp_url.removesuffix("/mcp"))
    notes = answer.parts[0].data["notes"]
    return [{"id": "notes", "score": len(notes) / 10, "result": True, "description": repr(notes)}]
"""
DEADLINES = Deadlines(start=300, call=30, end=120)
EMPTY = "notes [] files [] sleepers 0"
RULE = PlayRule(reward=None, trainer_agents=(), skills="show", turn_seconds=600, sandbox_seconds=3600)


def task(kind):
    """A task that asks for notes and scores how many there are."""
    return [
        {"id": "env", "type": "deploy_env", "env_id": kind},
        {"id": "agent", "type": "deploy_agent", "env_ids": [kind], "system_prompt": "", "depends_on": ["env"]},
        {"id": "ask", "type": "prompt_agent", "prompt": "Write notes.", "depends_on": ["agent"]},
        {
            "id": "notes",
            "type": "env_outcome_verifier",
            "env_id": kind,
            "file_artifact_id": "notes",
            "verifier_id": "notes",
            "score_aggregator": "weighted_average",
            "depends_on": ["ask"],
        },
    ]


@pytest.fixture(scope="module")
def workspace():
    """A folder of these tests alone; the images built from its bundle go with it."""
    with tempfile.TemporaryDirectory(prefix="pooled") as folder:
        yield Path(folder)
        name = re.sub(r"[^a-z0-9]+", "-", Path(folder).name.lower()).strip("-")
        listed = ["docker", "images", "--filter", f"reference=local/*{name}*", "--format", "{{.Repository}}:{{.Tag}}"]
        if images := subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split():
            subprocess.run(["docker", "rmi", "--force", *images], capture_output=True, check=True)


@pytest.fixture(scope="module")
def bundle(workspace):
    """One notebook of each kind, with a task for each."""
    root = workspace / "notebooks"
    (root / "tasks").mkdir(parents=True)
    (root / "artifacts" / "notes").mkdir(parents=True)
    (root / "artifacts" / "notes" / "verify.py").write_text(SCORES)
    for kind in KINDS:
        shutil.copytree(NOTEBOOK, root / "envs" / kind, ignore=shutil.ignore_patterns("__pycache__"))
        (root / "envs" / kind / "env.toml").write_text(f'env_provider_type = "server"\nenvironment_name = "{kind}"\n')
        (root / "tasks" / f"{kind}.json").write_text(json.dumps(task(kind)))
    return root


@pytest.fixture(scope="module")
def tasks(bundle):
    """The bundle's tasks, ready to be played, by name."""
    return {each.name: each for each in playable(str(bundle), rule=RULE, sandbox="pool").split("all")}


@pytest.fixture
def pool():
    """This process's pool, new, with no container up before or after."""
    made = the_pool()
    yield made
    made.close()
    assert ours() == []


def ours():
    """The names of the pool containers that this process owns."""
    client = docker.from_env()
    try:
        return [each.name for each in client.containers.list(all=True, filters={"label": mine(client)})]
    finally:
        client.close()


def mine(client):
    return f"{OWNER_LABEL}={Owners(client).me}"


def call(name, **arguments):
    return Call(name, name, arguments)


async def play(task, *calls, sandbox="pool", meet=None):
    """What the first look at the env shows, the container, and the score after `calls`; made once all have met."""
    run = EpisodeRun(task, sandbox, "test", 8, DEADLINES)
    await run.start()
    try:
        if meet is not None:
            await meet.wait()
        [seen] = await run.act([call("look")], in_order=True)
        [sandbox_id] = sandboxes_of(run)
        await run.act(calls, in_order=True)
        await run.end_turn("Done.")
        scores = await run.scores()
    finally:
        await run.abandon("the test is over")
    return seen.content[0]["text"], sandbox_id.rpartition("-")[0], scores["notes"]


def sandboxes_of(run):
    """The sandbox ids of a run that has started."""
    return framework.sandbox_ids(run._episode)


async def test_an_episode_in_a_recycled_container_is_as_one_in_a_fresh_one(pool, tasks):
    """The container is the same, what the agent sees is a fresh one's, and the rewards are those of cold containers."""
    cold = [await play(tasks["honest"], *[call("note", text="x")] * n, sandbox="local") for n in (1, 3)]
    warm = [await play(tasks["honest"], *[call("note", text="x")] * n) for n in (1, 3)]
    assert [(seen, score) for seen, _, score in warm] == [(seen, score) for seen, _, score in cold]
    assert [seen for seen, _, _ in warm] == [EMPTY, EMPTY]
    assert warm[0][1] == warm[1][1]


MARKS = {
    "a file": call("put", path="/tmp/mark", text="x"),
    "a file in memory": call("put", path="/dev/shm/mark", text="x"),
    "a file at home": call("put", path="/home/appuser/mark", text="x"),
    "a process": call("spawn"),
}


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
async def test_a_mark_that_the_reset_leaves_is_never_seen_again(pool, tasks, mark):
    """The container is thrown away, and the next episode has another, which is as new."""
    first, second = [await play(tasks["honest"], call("note", text="x"), mark) for _ in range(2)]
    assert first[0] == second[0] == EMPTY
    assert first[1] != second[1]
    assert first[2] == second[2] == 0.1


@pytest.mark.parametrize("kind", ["plain", "dirty", "liar", "crasher", "raiser", "leaky"])
async def test_an_env_that_does_not_reset_well_gets_a_fresh_container(pool, tasks, kind):
    """No note of an episode's is there in the next one."""
    played = [await play(tasks[kind], *[call("note", text="x")] * 2) for _ in range(3)]
    assert [(seen, score) for seen, _, score in played] == [(EMPTY, 0.2)] * 3
    assert len({container for _, container, _ in played}) == 3


async def test_recycling_can_be_turned_off(tasks, monkeypatch):
    """With RECYCLE=0 each episode has a container of its own."""
    monkeypatch.setenv("RECYCLE", "0")
    pool = the_pool()
    try:
        played = [await play(tasks["honest"]) for _ in range(2)]
    finally:
        pool.close()
    assert played[0][1] != played[1][1]


async def test_a_slow_start_is_waited_for_once(pool, tasks):
    """Later episodes find the env started."""
    await play(tasks["slow"])
    begun = time.monotonic()
    seen, _, _ = await play(tasks["slow"])
    assert seen == EMPTY
    assert time.monotonic() - begun < 60


async def test_no_two_episodes_share_a_container(pool, tasks):
    """Episodes at once see nothing of each other."""
    meet = asyncio.Barrier(6)  # one that ends before another starts may well leave it its container
    async with asyncio.timeout(300):
        played = await asyncio.gather(*(play(tasks["honest"], call("note", text="x"), meet=meet) for _ in range(6)))
    assert [(seen, score) for seen, _, score in played] == [(EMPTY, 0.1)] * 6
    assert len({container for _, container, _ in played}) == 6


async def test_the_container_of_a_failed_episode_is_thrown_away(pool, tasks):
    """An abandoned episode's container serves no other."""
    run = EpisodeRun(tasks["honest"], "pool", "test", 8, DEADLINES)
    await run.start()
    [sandbox_id] = sandboxes_of(run)
    await run.abandon("to see what comes of its container")
    _, container, _ = await play(tasks["honest"])
    assert container != sandbox_id.rpartition("-")[0]


async def test_the_container_of_an_episode_that_started_ahead_and_was_not_used_serves_another(pool, tasks):
    """It was set up and no more, which the reset undoes."""
    run = EpisodeRun(tasks["honest"], "pool", "test", 8, DEADLINES)
    run.start_ahead()
    assert await asyncio.wait_for(run._early, 300)
    [sandbox_id] = sandboxes_of(run)
    await run.abandon("it is not used")
    seen, container, score = await play(tasks["honest"], call("note", text="x"))
    assert (seen, container, score) == (EMPTY, sandbox_id.rpartition("-")[0], 0.1)


async def test_a_cancelled_start_leaves_no_container_out(pool, tasks):
    """Cancelled at any time, an episode gives back what it was about to get, and the next one plays."""
    for seconds in (0.0, 0.05, 0.2, 0.4):
        run = EpisodeRun(tasks["honest"], "pool", "test", 8)
        starting = asyncio.create_task(run.start())
        await asyncio.sleep(seconds)
        if not starting.cancel():  # it was quicker
            await run.abandon("cancelled")
        await asyncio.gather(starting, return_exceptions=True)
        assert run.over
    assert (await play(tasks["honest"]))[0] == EMPTY
    async with asyncio.timeout(60):
        while len(ours()) > 1:  # noqa: ASYNC110 - the one kept warm; Docker tells nobody
            await asyncio.sleep(0.2)


async def test_a_pool_that_closes_while_containers_start_leaves_none(tasks):
    """Who waits for them is told at once."""
    pool = the_pool()
    run = EpisodeRun(tasks["slow"], "pool", "test", 8, DEADLINES)
    starting = asyncio.create_task(run.start())
    async with asyncio.timeout(120):
        while not ours():  # noqa: ASYNC110 - Docker tells nobody
            await asyncio.sleep(0.1)
    await asyncio.to_thread(pool.close)
    with pytest.raises(EpisodeFailedError, match="the sandbox pool was closed"):
        await starting
    assert ours() == []


async def test_a_start_without_a_free_port_says_so(tasks):
    """At once, and leaves no container."""

    def none_left():
        raise RuntimeError("Every host port from 20000 to 29999 is in use")

    pool = Pool(Host(free_port=none_left), recycle=True)
    try:
        with pytest.raises(SandboxError, match=r"no host port is free for a container: .*20000 to 29999"):
            await pool.take(Spec(image="python:3.11-slim-trixie", port=80, env=()))
        assert ours() == []
    finally:
        pool.close()


def test_more_episodes_than_a_process_may_open_files_for_are_refused_before_any_starts():
    """The message names each limit."""
    code = "from agentenv_tinker.sandboxes import check_docker as c\nprint(c(episodes=8))\nc(episodes=100_000)"
    command = f"ulimit -n 1024; exec {sys.executable} -c '{code}'"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert re.fullmatch(r"\d+\.[\w.+]+\n", ran.stdout)
    assert re.search(
        r"SandboxError: 100000 episodes at once are too many: they open up to 1600256 files and this process may open "
        r"1024 \(`ulimit -Hn`\); each needs a port .*; each needs an address .* has \d+ left",
        ran.stderr,
    )


async def kill_at_random(seed, stop, results):
    """Kill a container of ours every now and then until `stop`: one for every three results."""
    chance = random.Random(seed)
    killed = 0
    client = docker.from_env()
    try:
        while not stop.is_set():
            await asyncio.sleep(chance.uniform(0.3, 1.5))
            if 3 * killed > len(results):
                continue
            up = await asyncio.to_thread(client.containers.list, filters={"label": mine(client)}, ignore_removed=True)
            if up:
                try:
                    await asyncio.to_thread(chance.choice(up).kill)
                    killed += 1
                except docker.errors.APIError:
                    pass  # it went meanwhile
    finally:
        client.close()
    return killed


async def test_hostile_envs_killed_at_random_score_as_in_cold_containers(pool, tasks):
    """Whatever its env is like, an episode scores what it earned, in one as new, or its env was killed; none hangs."""
    stop = asyncio.Event()
    results = []
    killer = asyncio.create_task(kill_at_random(7, stop, results))
    slots = asyncio.Semaphore(6)

    async def one(index):
        async with slots:
            kind, notes = KINDS[index % len(KINDS)], index % 4
            try:
                seen, _, score = await play(tasks[kind], *[call("note", text="x")] * notes)
            except EpisodeFailedError:
                results.append("failed")
            else:
                results.append("right" if (seen, score) == (EMPTY, notes / 10) else f"wrong: {kind}, {seen}, {score}")

    async with asyncio.timeout(120 + 15 * EPISODES):
        await asyncio.gather(*(one(index) for index in range(EPISODES)))
    stop.set()
    killed = await killer
    print(f"{killed} containers killed: {Counter(results)}")
    assert killed > 0
    assert set(results) <= {"right", "failed"}
    assert results.count("right") > 0
    assert len(results) == EPISODES
    assert (await play(tasks["honest"]))[0] == EMPTY


OWNER = """
import asyncio, sys
from agentenv_tinker.bundle import PlayRule, playable
from agentenv_tinker.episode import EpisodeRun
rule = PlayRule(reward=None, trainer_agents=(), skills="show", turn_seconds=600, sandbox_seconds=3600)
async def main():
    tasks = playable(sys.argv[1], rule=rule, sandbox="pool").split("all")
    run = EpisodeRun(next(task for task in tasks if task.name == "honest"), "pool", "test", 8)
    await run.start()
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_what_a_killed_process_left_is_removed_and_a_live_one_keeps_its_own(bundle, tasks):
    """Two processes have an episode each; one is killed; the next pool to start removes its container alone."""
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER, str(bundle)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    client = docker.from_env()
    try:
        assert [owner.stdout.readline() for owner in owners] == ["up\n", "up\n"]
        owners[0].kill()
        owners[0].wait()
        assert len(owned_by(client, owners[0].pid)) == 1
        pool = the_pool()
        until = time.monotonic() + 60
        while owned_by(client, owners[0].pid) and time.monotonic() < until:
            time.sleep(0.2)
        assert owned_by(client, owners[0].pid) == []
        assert len(owned_by(client, owners[1].pid)) == 1
        pool.close()
        owners[1].send_signal(signal.SIGINT)
        owners[1].wait(120)
        assert owned_by(client, owners[1].pid) == []
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
            owner.stdout.close()
        client.close()


def owned_by(client, pid):
    """The names of the pool containers of the process `pid` of this machine."""
    listed = client.containers.list(all=True, filters={"label": OWNER_LABEL})
    mine = Owners(client).me.rpartition("-")[0].rpartition("-")[0]
    return [
        each.name
        for each in listed
        if each.name.startswith(PREFIX) and each.labels[OWNER_LABEL].startswith(f"{mine}-{pid}-")
    ]


def test_an_owner_on_another_machine_keeps_its_containers_while_it_holds_a_lease():
    """What is nobody's is removed, and what a lease covers is not, until that lease is dropped."""
    client = docker.from_env()
    elsewhere = {name: f"{name}{'0' * 24}-4026531836-1-1" for name in ("leased00", "gone0000")}
    lease = client.volumes.create("agentenv-tinker-test-lease", labels={OWNER_LABEL: elsewhere["leased00"]})
    left = {
        name: client.containers.create("python:3.11-slim-trixie", labels={OWNER_LABEL: owner})
        for name, owner in elsewhere.items()
    }
    host = Host(free_port=int)
    try:
        host.reap()
        assert [name for name, each in left.items() if is_there(client, each.id)] == ["leased00"]
        lease.remove()
        host.reap()
        assert [name for name, each in left.items() if is_there(client, each.id)] == []
    finally:
        for each in left.values():
            host.remove(each.id)
        host.owners.release(elsewhere["leased00"])
        host.close()
        client.close()


def is_there(client, container_id):
    return bool(client.containers.list(all=True, filters={"id": container_id}))
