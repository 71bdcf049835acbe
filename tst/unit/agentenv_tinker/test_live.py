"""The live line: what it says as a run goes, and that it is for terminals alone."""

import io
import re
import time
from pathlib import Path

import pytest

from agentenv_tinker.live import Pulse, sparkline, watched

from .runs import write_run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_tells_step_rewards_and_what_is_left(tmp_path: Path) -> None:
    """Of a run with a step of two made: a step took ten seconds."""
    folder = write_run(tmp_path / "r", steps=1)
    line = Pulse(folder, time.monotonic()).line().plain
    assert line == "00:00 · step 1/2 · reward ▁ 0.375 · about 00:10 left · episodes: 0 played, 0 under way"


def test_before_the_first_step_there_are_the_episodes_alone(tmp_path: Path) -> None:
    """The folder need not be there yet."""
    assert Pulse(tmp_path / "none", time.monotonic()).line().plain == "00:00 · episodes: 0 played, 0 under way"


def test_the_rewards_span_the_bars() -> None:
    assert sparkline([0.0, 0.5, 1.0, 0.25]) == "▁▅█▃"
    assert sparkline([0.3]) == "▁"


def test_lines_go_above_the_live_line_of_a_terminal(tmp_path: Path) -> None:
    """And nothing of it is left at the end."""
    stream = Terminal()
    with watched(write_run(tmp_path / "r", steps=1), stream) as say:
        say("[model] said")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "[00:00] [model] said" in shown
    assert "step 1/2" in shown


@pytest.mark.parametrize("line", ["sandboxes: Docker 1", "[model]"])
def test_elsewhere_there_are_the_lines_alone(tmp_path: Path, line: str) -> None:
    stream = io.StringIO()
    with watched(write_run(tmp_path / "r", steps=1), stream) as say:
        say(line)
    assert stream.getvalue() == f"[00:00] {line}\n"
