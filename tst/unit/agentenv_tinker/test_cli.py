"""The command line, in process: what it says, and the code it exits with."""

import dataclasses
import sys
from pathlib import Path

import pytest

from agentenv_tinker.cli import main
from agentenv_tinker.config import EvalConfig, PlayConfig, RunConfig
from agentenv_tinker.evaluation import Plan, Rollout, evaluation_of


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `agentenv-tinker` with `arguments`."""
    monkeypatch.setattr(sys, "argv", ["agentenv-tinker", *arguments])
    try:
        main()
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


@pytest.mark.parametrize(
    ("command", "config", "renamed"),
    [
        ("train", RunConfig, {"checkpoint": "from"}),
        (
            "eval",
            EvalConfig,
            {"checkpoint": "from", "eval_split": "split", "eval_tasks": "tasks", "eval_temperature": "temperature"},
        ),
    ],
)
def test_every_setting_is_an_option(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    config: type[PlayConfig],
    renamed: dict[str, str],
) -> None:
    """`--help` lists an option for each setting but the bundle, an argument."""
    assert run(monkeypatch, command, "--help") == 0

    listed = capsys.readouterr().out
    settings = [setting.name for setting in dataclasses.fields(config) if setting.name != "bundle"]
    options = [renamed.get(name, name).replace("_", "-") for name in settings]
    assert [name for name in options if f"--{name} " not in listed] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train"], "Error: Missing argument 'BUNDLE'."),
        (["train", "b", "--steps", "many"], "Error: Invalid value for '--steps': 'many' is not a valid integer."),
        (["train", "b", "--step", "3"], "Error: No such option"),
        (["trian"], "Error: No such command 'trian'."),
        (["train", "./b", "--group-size", "0"], "agentenv-tinker: group_size must be 1 or more, not 0"),
        (["eval", "./b", "--samples", "0"], "agentenv-tinker: samples must be 1 or more, not 0"),
        (["eval", "./b", "--above", "nan"], "agentenv-tinker: a reward to compare with must be a finite number"),
        (["eval", "./b", "--from", "nowhere"], "agentenv-tinker: 'nowhere' is neither a tinker:// path nor a run's"),
        (["compare", "a.json", "b.json"], "agentenv-tinker: 'a.json' can't be read as an evaluation: "),
    ],
    ids=[
        *("no bundle", "no number", "unknown option", "unknown command", "refused setting"),
        *("no sample", "no threshold", "no checkpoint", "no evaluation"),
    ],
)
def test_bad_input_exits_with_2_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    """The last line says what is wrong, and nothing is on standard output."""
    assert run(monkeypatch, *arguments) == 2

    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith(told)
    assert said.out == ""


def write_evaluation(path: Path, **rewards: float) -> Path:
    """An evaluation of a sample of each task."""
    plan = Plan(label="e", step=0, model="m", checkpoint=None, split="held", tasks=tuple(rewards))
    rollouts = [
        Rollout(task=task, reward=reward, scores={}, flags={}, amounts={}, stop_reason="completed")
        for task, reward in rewards.items()
    ]
    evaluation_of(plan, rollouts).write(path)
    return path


def test_two_evaluations_are_compared_by_their_files_or_folders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The folder of an `eval` run means its `evaluation.json`."""
    first = write_evaluation(tmp_path / "run" / "evaluation.json", a=0.0, b=0.5)
    second = write_evaluation(tmp_path / "other.json", a=1.0, b=0.5)

    assert run(monkeypatch, "compare", str(first.parent), str(second)) == 0

    assert capsys.readouterr().out.splitlines()[2:6] == [
        "compared    2 tasks",
        "reward      0.250 -> 0.750",
        "difference  +0.500, 95% interval -5.853 to +6.853, p = 0.500",
        "tasks       1 better, 0 worse, 1 the same",
    ]


def test_a_training_runs_folder_is_no_single_evaluation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The error names those that it holds."""
    for name in ("step-0", "final"):
        write_evaluation(tmp_path / "evaluations" / f"{name}.json", a=0.0)

    assert run(monkeypatch, "compare", str(tmp_path), str(tmp_path)) == 2

    holds = f"{str(tmp_path)!r} holds several evaluations; name one: "
    named = ", ".join(str(tmp_path / "evaluations" / f"{name}.json") for name in ("final", "step-0"))
    assert capsys.readouterr().err == f"agentenv-tinker: {holds}{named}\n"
