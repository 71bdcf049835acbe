"""Bad input to `agentenv-tinker train`: one clear line, exit code 2, nothing started and nothing left behind."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

GRIDSIM = Path(__file__).resolve().parents[2] / "bundles" / "gridsim"
SERVED_KEY = "tml-served"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a tinker_local that serves the tiny model, to the right key alone."""
    command = [sys.executable, "-m", "tinker_local", "--model", "tiny", "--port", "0", "--until-eof"]
    data = tmp_path_factory.mktemp("data")
    with subprocess.Popen(
        [*command, "--data", str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TINKER_LOCAL_API_KEY": SERVED_KEY},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().rpartition(" at ")[2].strip()
        finally:
            process.stdin.close()


@pytest.fixture
def gridsim(tmp_path: Path) -> Path:
    """A small GridSim of the test's own: two tasks, one of them held out."""
    root = tmp_path / "gridsim"
    for folder in ("envs", "artifacts"):
        shutil.copytree(GRIDSIM / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder, name, text in (
        ("tasks", "train-000.json", (GRIDSIM / "tasks" / "train-000.json").read_text()),
        ("tasks", "held_out-000.json", (GRIDSIM / "tasks" / "held_out-000.json").read_text()),
        ("evals", "train.toml", 'tasks = ["train-000"]'),
        ("evals", "held_out.toml", 'tasks = ["held_out-000"]'),
    ):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / name).write_text(text)
    return root


def refused(folder: Path, *arguments: str, **environment: str) -> str:
    """The line that `agentenv-tinker train` refuses its input with; nothing else may come of it."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    done = subprocess.run(
        [sys.executable, "-m", "agentenv_tinker", "train", *arguments],
        cwd=folder,
        env={**known, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(said) == 1, done.stderr
    assert not (folder / "runs").exists()
    return said[0].removeprefix("agentenv-tinker: ")


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    """A folder with nothing of a bundle in it is told as one."""
    (tmp_path / "empty").mkdir()

    assert "not a bundle" in refused(tmp_path, "empty")


def test_a_bundle_with_an_invalid_task(tmp_path: Path, gridsim: Path) -> None:
    """The task's file and its fault are named."""
    (gridsim / "tasks" / "train-000.json").write_text(json.dumps([{"id": "env", "type": "deploy_evn"}]))

    line = refused(tmp_path, "gridsim")

    assert "train-000.json" in line
    assert "deploy_evn" in line


def test_an_unknown_split(tmp_path: Path, gridsim: Path) -> None:
    """The splits there are, are named."""
    assert (
        refused(tmp_path, "gridsim", "--eval-split", "test")
        == "there is no split 'test'; the splits are 'all', 'held_out', 'train'"
    )


def test_an_unknown_reward(tmp_path: Path, gridsim: Path) -> None:
    """The steps that record a score are named."""
    line = refused(tmp_path, "gridsim", "--reward", "speed")

    assert line == (
        "task 'train-000' of split 'train' makes no reward: it records no score at step 'speed'; "
        "it records one at 'profit'"
    )


def test_an_unreachable_docker_daemon(tmp_path: Path, gridsim: Path) -> None:
    """The line says that no daemon answers, and how to name one."""
    line = refused(tmp_path, "gridsim", DOCKER_HOST="unix:///nowhere/docker.sock")

    assert line.startswith("no Docker daemon answers (")
    assert line.endswith("; start one, or name one with DOCKER_HOST")


def test_an_unreachable_service(tmp_path: Path, gridsim: Path) -> None:
    """The line says which service, and what to look at."""
    line = refused(tmp_path, "gridsim", TINKER_BASE_URL="http://127.0.0.1:9", TINKER_API_KEY="tml-any")

    assert line == (
        "the Tinker service at http://127.0.0.1:9 does not answer (All connection attempts failed); "
        "is TINKER_BASE_URL right?"
    )


def test_a_wrong_key(tmp_path: Path, gridsim: Path, served: str) -> None:
    """The line says which variable holds the key, and never the key."""
    model = ("--model", "tiny", "--renderer", "qwen3_instruct")
    line = refused(tmp_path, "gridsim", *model, TINKER_BASE_URL=served, TINKER_API_KEY="tml-other")

    assert line.startswith(f"the Tinker service at {served} refuses the key in TINKER_API_KEY")
    assert "tml-other" not in line


def test_a_model_that_the_service_does_not_have(tmp_path: Path, gridsim: Path, served: str) -> None:
    """The models there are, are named."""
    renderer = ("--renderer", "qwen3_instruct")
    line = refused(
        tmp_path, "gridsim", "--model", "nobody/none", *renderer, TINKER_BASE_URL=served, TINKER_API_KEY=SERVED_KEY
    )

    assert line == f"the Tinker service at {served} has no model 'nobody/none'; it has 'tiny'"


def test_a_model_that_cannot_be_found_to_serve(tmp_path: Path, gridsim: Path) -> None:
    """With no key, the local service's own words are told."""
    line = refused(tmp_path, "gridsim", "--model", "./nowhere", "--renderer", "qwen3_instruct")

    assert "./nowhere" in line


def test_a_model_with_no_known_renderer(tmp_path: Path, gridsim: Path) -> None:
    """The line names the option that sets one."""
    line = refused(tmp_path, "gridsim", "--model", "nobody/none")

    assert line.startswith("no renderer is known for model 'nobody/none'; name one with --renderer")


def test_a_renderer_that_cannot_write_tools(tmp_path: Path, gridsim: Path, served: str) -> None:
    """The line names the renderer, and one that would do."""
    line = refused(
        tmp_path,
        *("gridsim", "--model", "tiny", "--renderer", "role_colon"),
        TINKER_BASE_URL=served,
        TINKER_API_KEY=SERVED_KEY,
    )

    assert line == "renderer RoleColonRenderer can't write tools; choose one that can, such as 'qwen3_instruct'"


def test_a_run_that_exists(tmp_path: Path, gridsim: Path) -> None:
    """A folder of results is never overwritten."""
    kept = tmp_path / "results" / "mine" / "summary.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")

    line = refused(tmp_path, "gridsim", "--runs", "results", "--run", "mine")

    assert line == "run 'mine' exists already in results/mine; choose another name, or remove it"
    assert kept.read_text() == "{}"
