"""The command line, in process: what it says, and the code it exits with."""

import dataclasses
import sys

import pytest

from agentenv_tinker.cli import main
from agentenv_tinker.config import RunConfig


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `agentenv-tinker` with `arguments`."""
    monkeypatch.setattr(sys, "argv", ["agentenv-tinker", *arguments])
    try:
        main()
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


def test_every_setting_is_an_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`train --help` lists an option for each setting but the bundle, an argument."""
    assert run(monkeypatch, "train", "--help") == 0

    listed = capsys.readouterr().out
    settings = [setting.name for setting in dataclasses.fields(RunConfig) if setting.name != "bundle"]
    options = ["from" if name == "checkpoint" else name.replace("_", "-") for name in settings]
    assert [name for name in options if f"--{name} " not in listed] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train"], "Error: Missing argument 'BUNDLE'."),
        (["train", "b", "--steps", "many"], "Error: Invalid value for '--steps': 'many' is not a valid integer."),
        (["train", "b", "--step", "3"], "Error: No such option"),
        (["trian"], "Error: No such command 'trian'."),
        (["train", "./b", "--group-size", "0"], "agentenv-tinker: group_size must be 1 or more, not 0"),
    ],
    ids=["no bundle", "no number", "unknown option", "unknown command", "refused setting"],
)
def test_bad_input_exits_with_2_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    """The last line says what is wrong, and nothing is on standard output."""
    assert run(monkeypatch, *arguments) == 2

    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith(told)
    assert said.out == ""
