"""Ctrl-C, once and twice, in a process of its own."""

import os
import signal
import subprocess
import sys

import pytest

COMMAND = """
import asyncio, signal, sys
from pathlib import Path
from agentenv_tinker import cli

async def command(say):
    say("started")
    try:
        await asyncio.sleep(60)
    finally:
        say("tearing down")
        {teardown}
        say("torn down")

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.cli = lambda **_: cli._run(Path("none"), command)
cli.main()
"""
PATIENT = "await asyncio.sleep(0.1)"
STUCK = "await asyncio.to_thread(__import__('time').sleep, 60)"


def interrupted(teardown: str, *awaited: str) -> tuple[int, list[str]]:
    """The exit code and what was said of a command that is sent a SIGINT as it says each of `awaited`."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(teardown=teardown)], stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stderr is not None
    said: list[str] = []
    waiting = list(awaited)
    with process:
        for line in process.stderr:
            said.append(line.strip())
            if waiting and line.strip().endswith(waiting[0]):
                waiting.pop(0)
                os.kill(process.pid, signal.SIGINT)
        return process.wait(timeout=30), said


def test_the_first_waits_for_the_teardown() -> None:
    """And says how not to."""
    code, said = interrupted(PATIENT, "started")
    assert code == 130
    assert [line.removeprefix("[00:00] ") for line in said] == [
        "started",
        "stopping; Ctrl-C again leaves at once",
        "tearing down",
        "torn down",
        "agentenv-tinker: interrupted",
    ]


@pytest.mark.parametrize("teardown", [PATIENT.replace("0.1", "60"), STUCK], ids=["slow", "stuck in a thread"])
def test_the_second_leaves_at_once(teardown: str) -> None:
    """Whatever the teardown waits for."""
    code, said = interrupted(teardown, "started", "tearing down")
    assert code == 130
    assert (
        said[-1]
        == "agentenv-tinker: left at once; what it was running goes at the next start, or with the sandbox host"
    )
    assert not any(line.endswith("torn down") for line in said)
