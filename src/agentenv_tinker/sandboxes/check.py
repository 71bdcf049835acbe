"""Checks, before a run, that a sandbox host is there for its episodes, and can hold those of them that are at once."""

import ipaddress
import resource
import shutil
from typing import Any

from docker.errors import DockerException

import docker
from agentenv_tinker.errors import SandboxError, described

_ANSWER_SECONDS = 10
_FILES = 256  # that a process has open besides its episodes'
_FILES_AN_EPISODE = 16  # its proxy's and its connections: 10 seen
_HOST_PORTS = 10_000  # that the framework publishes containers on


def check_docker(*, episodes: int) -> str:
    """The Docker daemon's version. Blocks for up to 10 s. Lets this process open as many files as it may.

    Raises SandboxError where no daemon answers, where the `docker` command that the framework calls is missing, or
    where `episodes` at once would need more files, ports or addresses than there are.
    """
    if shutil.which("docker") is None:
        raise SandboxError("the `docker` command is not installed; episodes run their envs with it")
    try:
        client = docker.from_env(timeout=_ANSWER_SECONDS)
        try:
            version = str(client.version()["Version"])
            addresses = _free_addresses(client.networks.list(names=["bridge"], greedy=True))
        finally:
            client.close()
    except DockerException as error:
        raise SandboxError(
            f"no Docker daemon answers ({described(error)}); start one, or name one with DOCKER_HOST"
        ) from error
    _check_room(episodes, addresses)
    return version


def _free_addresses(networks: list[Any]) -> int | None:
    """How many more containers the daemon's default network has addresses for; None where that can't be told."""
    for network in networks:
        for config in (network.attrs.get("IPAM") or {}).get("Config") or []:
            subnet = ipaddress.ip_network(config.get("IPRange") or config["Subnet"])
            return subnet.num_addresses - 3 - len(network.attrs.get("Containers") or {})
    return None


def _check_room(episodes: int, addresses: int | None) -> None:
    """Raise SandboxError naming each limit that `episodes` at once are over."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = _FILES + _FILES_AN_EPISODE * episodes
    problems = []
    if files > hard != resource.RLIM_INFINITY:
        problems.append(f"they open up to {files} files and this process may open {hard} (`ulimit -Hn`)")
    if episodes > _HOST_PORTS:
        problems.append(f"each needs a port of this machine and the framework has {_HOST_PORTS} for them")
    if addresses is not None and episodes > addresses:
        problems.append(f"each needs an address and Docker's default network has {addresses} left (dockerd's `--bip`)")
    if problems:
        raise SandboxError(f"{episodes} episodes at once are too many: {'; '.join(problems)}")
