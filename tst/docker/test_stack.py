"""The stack as it runs: real services, a real Docker daemon inside, sandboxes on it; a tiny model."""

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CALLER = "12345:12345"
SERVE = ("run", "--detach", "--name", "web", "--publish", "127.0.0.1:20000:8000", "python:3.11-slim-trixie")
READ_PORT = """
import sys, time, urllib.request
for _ in range(50):
    try:
        sys.exit(print(urllib.request.urlopen("http://127.0.0.1:20000").status))
    except OSError:
        time.sleep(0.2)
"""
TRY_PORTS = """
import socket
for address in (("127.0.0.1", 8077), ("10.200.0.1", 8077)):
    try:
        socket.create_connection(address, timeout=5)
        print("reached", *address)
    except OSError:
        print("refused", *address)
"""
TRY_PORT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
    print("reached")
except OSError:
    print("refused")
"""


class Stack:
    """`docker compose` on compose.yaml, for a project of a test's own, which leaves other stacks alone."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.project = f"agentenv-tinker-test-{uuid.uuid4().hex[:8]}"
        self.runs = folder / "runs"
        self.runs.mkdir()
        volumes = [f"{self.runs}:/runs"]
        tiny = ["python", "-m", "tinker_local", "--model", "tiny", "--port", "8077", "--data", "/runs/.tinker"]
        override = folder / "override.json"
        override.write_text(
            json.dumps({"services": {"tinker": {"command": tiny, "volumes": volumes}, "trainer": {"volumes": volumes}}})
        )
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "UID_GID"))}
        own = {"COMPOSE_PROJECT_NAME": self.project, "COMPOSE_FILE": f"{REPOSITORY / 'compose.yaml'}:{override}"}
        self.environment = kept | own | variables

    def compose(self, *arguments: str) -> str:
        done = subprocess.run(
            ["docker", "compose", "--progress", "quiet", *arguments],
            cwd=REPOSITORY,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def up(self) -> None:
        self.compose("up", "--detach", "--wait", "--wait-timeout", "240")

    def down(self) -> None:
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans")

    def in_trainer(self, *command: str) -> str:
        return self.compose("exec", "--no-TTY", "trainer", *command)

    def found(self) -> list[str]:
        """The containers, volumes and networks of the project."""
        ours = ("--quiet", "--filter", f"label=com.docker.compose.project={self.project}")
        return [
            name
            for listing in (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
            for name in listed(*listing, *ours)
        ]


def listed(*arguments: str) -> list[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=True).stdout.split()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that is up, with the local service; its runs folder belongs to somebody who is not root."""
    own = Stack(tmp_path_factory.mktemp("stack"))
    os.chown(own.runs, *map(int, CALLER.split(":")))
    try:
        own.up()
        yield own
    finally:
        own.down()


@pytest.fixture
def web(stack: Stack) -> Iterator[str]:
    """A container on the sandbox host that serves a port on 127.0.0.1."""
    stack.in_trainer("docker", *SERVE, "python", "-m", "http.server")
    try:
        yield "web"
    finally:
        stack.in_trainer("docker", "rm", "--force", "web")


def test_every_service_comes_up_healthy(stack: Stack) -> None:
    """All four run, and pass their health checks."""
    rows = [json.loads(line) for line in stack.compose("ps", "--format", "json").splitlines()]

    assert sorted((row["Service"], row["State"], row["Health"]) for row in rows) == [
        ("loopback", "running", "healthy"),
        ("sandboxes", "running", "healthy"),
        ("tinker", "running", "healthy"),
        ("trainer", "running", "healthy"),
    ]


def test_the_trainer_reaches_a_sandboxes_port_on_loopback(stack: Stack, web: str) -> None:
    """A port that a sandbox publishes answers the trainer at 127.0.0.1."""
    assert stack.in_trainer("python", "-c", READ_PORT).strip() == "200"


def test_a_sandbox_reaches_no_service_of_the_stack(stack: Stack, web: str) -> None:
    """Neither a sandbox's own loopback nor its gateway leads to the Tinker service."""
    assert stack.in_trainer("docker", "exec", web, "python", "-c", TRY_PORTS).splitlines() == [
        "refused 127.0.0.1 8077",
        "refused 10.200.0.1 8077",
    ]


def test_what_a_run_writes_belongs_to_the_owner_of_the_runs_folder(stack: Stack) -> None:
    """A new trainer gives up root for whom /runs belongs to, and can still use the sandbox host."""
    stack.compose("run", "--rm", "--no-TTY", "--no-deps", "trainer", "sh", "-c", "docker ps && mkdir -p /runs/mine")
    written = (stack.runs / "mine").stat()

    assert f"{written.st_uid}:{written.st_gid}" == CALLER


def test_a_killed_sandbox_host_comes_back_for_the_trainer_that_is_there(stack: Stack) -> None:
    """After `up`, the old trainer reaches the ports of new sandboxes, and the old sandboxes are gone."""
    stack.in_trainer("docker", *SERVE, "sleep", "600")
    stack.compose("kill", "sandboxes")
    stack.up()
    stack.in_trainer("docker", *SERVE, "python", "-m", "http.server")

    try:
        assert stack.in_trainer("python", "-c", READ_PORT).strip() == "200"
    finally:
        stack.in_trainer("docker", "rm", "--force", "web")


@pytest.fixture
def neighbour() -> Iterator[str]:
    """The address of a container outside of the stack that serves port 8000 to the machine's own network."""
    serve = ("run", "--detach", "--rm", "agentenv-tinker:latest", "python", "-m", "http.server")
    [container] = listed(*serve)
    try:
        [address] = listed("inspect", "--format", "{{.NetworkSettings.IPAddress}}", container)
        yield address
    finally:
        listed("rm", "--force", container)


@pytest.mark.parametrize(("network", "told"), [("off", "refused"), ("on", "reached")])
def test_a_sandbox_reaches_what_is_outside_only_with_the_network_on(
    stack: Stack, neighbour: str, network: str, told: str
) -> None:
    """With it off its published port answers nevertheless; it is on again for a sandbox host that comes after."""
    stack.environment["SANDBOX_NETWORK"] = network
    stack.up()
    stack.in_trainer("docker", *SERVE, "python", "-m", "http.server")

    try:
        assert stack.in_trainer("python", "-c", READ_PORT).strip() == "200"
        tried = stack.in_trainer("docker", "exec", "web", "python", "-c", TRY_PORT, neighbour, "8000")
        assert tried.strip() == told
    finally:
        stack.in_trainer("docker", "rm", "--force", "web")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)
def test_a_signal_to_the_whole_group_is_passed_on_and_waited_for(stack: Stack, signum: signal.Signals) -> None:
    """What a run says and does after a Ctrl-C is seen to its end, with its exit code, and its container is gone."""
    before = stack.found()
    script = "trap 'sleep 2; echo torn down; exit 130' INT TERM; echo started; while :; do sleep 0.1; done"
    with subprocess.Popen(
        ["stack/attached", "trainer", "bash", "-c", script],
        cwd=REPOSITORY,
        env=stack.environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        os.killpg(process.pid, signum)
        said = process.stdout.read()

    assert (said, process.returncode) == ("torn down\n", 130)
    assert sorted(stack.found()) == sorted(before)


def test_taking_it_down_leaves_nothing(tmp_path: Path) -> None:
    """No container, volume or network of the project is left, with a sandbox running and a one-off trainer too."""
    own = Stack(tmp_path, TINKER_API_KEY="tml-none")
    try:
        own.up()
        own.in_trainer("docker", *SERVE, "sleep", "600")
        own.compose("run", "--detach", "--no-deps", "trainer", "sleep", "600")
        assert own.found()
    finally:
        own.down()

    assert own.found() == []
