"""What an env container gets of its host, tried from inside it."""

import json
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from agentenv_tinker.sandboxes.host import Container, Host, Spec
from agentenv_tinker.sandboxes.limits import Limits
from agentenv_tinker.sandboxes.provider import local

SERVE = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Card(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"name": "tiny"}')
HTTPServer(("", 8000), Card).serve_forever()
"""
FILL = "held = bytearray(256 << 20); print(len(held))"
FORK = """
import subprocess
try:
    started = [subprocess.Popen(["sleep", "5"]) for _ in range(100)]
    print("all of them started")
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture
def image() -> Iterator[str]:
    """An env that serves its card, and no more."""
    name = f"agentenv-tinker-test-{uuid.uuid4().hex[:8]}"
    dockerfile = f"FROM python:3.11-slim-trixie\nCMD {json.dumps(['python', '-c', SERVE])}\n"
    subprocess.run(["docker", "build", "--quiet", "--tag", name, "-"], input=dockerfile, text=True, check=True)
    yield name
    subprocess.run(["docker", "rmi", "--force", name], check=True)


@pytest.fixture
def env(image: str) -> Iterator[Container]:
    """Its container, under bounds of 64 MB, half a CPU and 32 processes."""
    host = Host(free_port=local._free_host_port, limits=Limits(memory="64m", cpus=0.5, pids=32))
    made = host.start(Spec(image=image, port=8000, env=()))
    try:
        yield made
    finally:
        host.remove(made.id)
        host.owners.release(host.owners.me)
        host.close()


def inside(env: Container, script: str) -> tuple[int, str]:
    """The exit code and output of a Python script in the container."""
    command = ["docker", "exec", env.id, "python", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout.strip()


def test_an_env_is_held_to_its_memory_and_processes(env: Container) -> None:
    """What takes more memory is killed, and one process more than allowed is refused."""
    assert inside(env, FILL) == (137, "")
    assert inside(env, FORK) == (0, "Resource temporarily unavailable")


def test_an_env_is_held_to_its_share_of_the_cpu(env: Container) -> None:
    """The kernel has the quota that was asked for."""
    listed = ["docker", "inspect", "--format", "{{.HostConfig.CpuQuota}}/{{.HostConfig.CpuPeriod}}", env.id]
    assert subprocess.run(listed, capture_output=True, text=True, check=True).stdout.strip() == "50000/100000"
