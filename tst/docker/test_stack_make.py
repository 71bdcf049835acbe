"""What `make` answers before it starts anything."""

import os
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=REPOSITORY,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_make_alone_lists_every_target() -> None:
    """Each target that a person can ask for has its line in the list."""
    declared = re.search(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text().replace("\\\n", ""), re.MULTILINE)
    listed = re.findall(r"^  ([a-z0-9-]+) ", make().stdout, re.MULTILINE)

    assert declared is not None
    assert sorted(listed) == sorted(set(declared[1].split()) - {"bundle", "docker", "runs"})


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            ("train", "BUNLDE=x"), "unknown variable BUNLDE: `make` lists the known ones", id="mistyped variable"
        ),
        pytest.param(("train", "BUNDLE=no/such"), "no such bundle folder: BUNDLE='no/such'", id="no bundle"),
        pytest.param(("train", "BUNDLE="), "no such bundle folder: BUNDLE=''", id="empty bundle"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: tuple[str, ...], line: str) -> None:
    """The first line says what is wrong, and the exit code is 2."""
    refused = make(*arguments)

    assert refused.returncode == 2
    assert line in refused.stderr.splitlines()[0]
    assert refused.stdout == ""


def test_a_missing_daemon_is_named_before_anything_starts() -> None:
    """With no Docker daemon at DOCKER_HOST, `make up` says so and ends with exit code 2."""
    refused = make("up", DOCKER_HOST="unix:///nowhere.sock")

    assert refused.returncode == 2
    assert refused.stderr.splitlines()[0].startswith("no Docker daemon answers: start Docker, or set DOCKER_HOST")
    assert refused.stdout == ""
