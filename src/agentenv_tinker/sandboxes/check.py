"""Checks, before a run, that a sandbox host is there for its episodes."""

import shutil

from docker.errors import DockerException

import docker
from agentenv_tinker.errors import SandboxError, described

_ANSWER_SECONDS = 10


def check_docker() -> str:
    """The Docker daemon's version. Blocks for up to 10 s.

    Raises SandboxError where no daemon answers, or where the `docker` command that the framework calls is missing.
    """
    if shutil.which("docker") is None:
        raise SandboxError("the `docker` command is not installed; episodes run their envs with it")
    try:
        client = docker.from_env(timeout=_ANSWER_SECONDS)
        try:
            return str(client.version()["Version"])
        finally:
            client.close()
    except DockerException as error:
        raise SandboxError(
            f"no Docker daemon answers ({described(error)}); start one, or name one with DOCKER_HOST"
        ) from error
