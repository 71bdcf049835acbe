"""What compose.yaml gives each service, and what it keeps from it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def services(**variables: str) -> dict[str, Any]:
    """The services that `docker compose` would start, in an environment with these variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "COMPOSE_"))}
    shown = subprocess.run(
        ["docker", "compose", "config", "--format", "json"],
        cwd=REPOSITORY,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    configured: dict[str, Any] = json.loads(shown.stdout)["services"]
    return configured


def told(service: dict[str, Any], prefix: str) -> dict[str, str]:
    """The environment variables of a service whose names start with `prefix`."""
    environment: dict[str, str] = service.get("environment") or {}
    return {name: value for name, value in environment.items() if name.startswith(prefix)}


def test_without_a_key_the_trainer_uses_the_service_of_the_stack() -> None:
    """The local service starts by itself and the trainer has its address."""
    configured = services()

    assert sorted(configured) == ["loopback", "sandboxes", "tinker", "trainer"]
    assert told(configured["trainer"], "TINKER_") == {
        "TINKER_API_KEY": "tml-local",
        "TINKER_BASE_URL": "http://127.0.0.1:8077",
    }


def test_with_a_key_the_trainer_alone_has_it_and_no_local_service_starts() -> None:
    """The key reaches the trainer and nothing else, and the address is left to the SDK."""
    configured = services(TINKER_API_KEY="tml-secret")

    assert sorted(configured) == ["loopback", "sandboxes", "trainer"]
    assert told(configured["trainer"], "TINKER_") == {"TINKER_API_KEY": "tml-secret"}
    assert "tml-secret" not in json.dumps({name: configured[name] for name in ("loopback", "sandboxes")})


def test_an_address_of_ones_own_is_passed_on() -> None:
    """TINKER_BASE_URL goes with the key to the trainer."""
    configured = services(TINKER_API_KEY="tml-secret", TINKER_BASE_URL="http://tinker.example")

    assert told(configured["trainer"], "TINKER_") == {
        "TINKER_API_KEY": "tml-secret",
        "TINKER_BASE_URL": "http://tinker.example",
    }


def test_no_service_is_privileged_and_each_has_the_fewest_capabilities() -> None:
    """The sandbox host adds three capabilities to Docker's own set; the others drop that set."""
    configured = services()

    assert not any(service.get("privileged") for service in configured.values())
    assert {name: (service.get("cap_drop"), service.get("cap_add")) for name, service in configured.items()} == {
        "loopback": (["ALL"], None),
        "sandboxes": (None, ["SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE"]),
        "tinker": (["ALL"], ["SETUID", "SETGID", "KILL"]),
        "trainer": (["ALL"], ["SETUID", "SETGID", "KILL"]),
    }


def test_every_service_is_bounded_in_memory_and_processes() -> None:
    """Each bound has a default, and a variable where a run may need more."""
    bounds = {name: (service["mem_limit"], service["pids_limit"]) for name, service in services().items()}

    assert bounds == {
        "loopback": (str(64 << 20), 16),
        "sandboxes": (str(16 << 30), 16384),
        "tinker": (str(16 << 30), 1024),
        "trainer": (str(8 << 30), 4096),
    }
    assert services(TRAINER_MEMORY="1g", TRAINER_PIDS="99")["trainer"]["mem_limit"] == str(1 << 30)


def test_the_explorer_has_no_key_and_no_daemon() -> None:
    """It comes with its profile alone, as the caller, and mounts the runs."""
    explorer = services(COMPOSE_PROFILES="explorer", TINKER_API_KEY="tml-secret", RUN="first")["explorer"]

    assert [mount["target"] for mount in explorer["volumes"]] == ["/runs"]
    assert told(explorer, "DOCKER_") == told(explorer, "TINKER_") == {}
    assert explorer["environment"]["XDG_STATE_HOME"] == "/runs/first/records"
    assert (explorer["cap_drop"], explorer.get("ports")) == (["ALL"], None)


def test_no_service_publishes_a_port_or_mounts_the_hosts_docker_socket() -> None:
    """From the host comes the runs folder alone, and no port is open to it."""
    configured = services()
    mounted = [mount for service in configured.values() for mount in service.get("volumes", [])]

    assert {mount["source"] for mount in mounted if mount["type"] == "bind"} == {str(REPOSITORY / "runs")}
    assert not any(service.get("ports") for service in configured.values())
