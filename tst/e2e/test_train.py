"""A real run outside the stack: a warm start, RL steps, evaluations that show what was learned; its end by Ctrl-C."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from agent_env.bundle import prepare_bundle
from agent_env.store.routing import namespace_routing
from agent_env.task import EpisodeSpec

REPOSITORY = Path(__file__).resolve().parents[2]
GRIDSIM = REPOSITORY / "bundles" / "gridsim"
EVAL_TASKS = 16
STEPS = 2


def command(runs: Path, run: str, *more: str) -> list[str]:
    small = ("--steps", str(STEPS), "--groups-per-batch", "2", "--group-size", "4", "--warm-start-steps", "16")
    where = ("--runs", str(runs), "--run", run, "--eval-tasks", str(EVAL_TASKS), "--recipe", "quick")
    return [sys.executable, "-m", "agentenv_tinker", "train", str(GRIDSIM), *where, *small, *more]


def without_service() -> dict[str, str]:
    """This environment, with no Tinker service named in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def output(runs: Path) -> str:
    """What a run of the default model prints, once it is done."""
    done = subprocess.run(
        command(runs, "whole"), env=without_service(), capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(runs: Path, output: str) -> Path:
    return runs / "whole"


def rollouts(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rollouts in a record of the cookbook's."""
    path = folder / f"{name}_rollout_summaries.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("when", "label", "record"),
    [("before", "step-0", "iteration_000000/eval_test"), ("after", "final", "evaluations/final")],
)
def test_printed_rewards_are_those_of_the_records(
    output: str, folder: Path, when: str, label: str, record: str
) -> None:
    """Each printed mean is that of the rollouts recorded then, one for each task, and so is the evaluation's."""
    printed = re.search(rf"held-out reward {when}: +(\d\.\d+) \+/- (\S+) \(s\.e\.\) over (\d+) episodes", output)
    rewards = [rollout["total_reward"] for rollout in rollouts(folder, record)]
    evaluation = json.loads((folder / "evaluations" / f"{label}.json").read_text())

    assert printed is not None, output
    assert len(rewards) == EVAL_TASKS
    assert float(printed[1]) == pytest.approx(sum(rewards) / len(rewards), abs=5e-4)
    assert int(printed[3]) == EVAL_TASKS
    assert [reward for task in evaluation["tasks"] for reward in task["rewards"]] == rewards


def test_a_model_that_could_not_do_it_does_it(folder: Path) -> None:
    """The base model earns nothing, the trained one something.

    The base model earned 0.000 on 200 held-out days; 16 supervised steps of 8 earned 0.26 +/- 0.06 on 40, 24 of 4, of
    which this makes 16, 0.32 +/- 0.06; a random schedule earns 0.15.
    """
    base, after = (
        json.loads((folder / "evaluations" / f"{label}.json").read_text())["mean"] for label in ("base", "final")
    )

    assert base < 0.01
    assert after > 0.02


def test_every_step_trained_on_real_rollouts(folder: Path) -> None:
    """Each step has its eight rollouts, and the trainer's probabilities of their tokens are the sampler's."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "progress/batch" in line]

    assert [len(rollouts(folder, f"iteration_{step:06d}/train")) for step in range(STEPS)] == [8] * STEPS
    assert [line["progress/batch"] for line in steps] == list(range(STEPS))
    assert all(abs(line["optim/kl_sample_train_v1"]) < 1e-3 for line in steps)


def test_the_run_folder_holds_everything(folder: Path) -> None:
    """Settings, metrics, rollouts as pages, checkpoints, the adapter and the run records are there."""
    for name in (
        *("recipe.toml", "summary.json", "metrics.jsonl", "checkpoints.jsonl", "logs.log"),
        *("iteration_000000/train.html", "iteration_000000/eval_test.html", "evaluations/final.html"),
        *("checkpoints/final/adapter_model.safetensors", "checkpoints/final/adapter_config.json", "records/agent-env"),
    ):
        assert (folder / name).exists(), name


def test_a_recorded_rollout_scores_the_same_when_its_actions_are_played_by_hand(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The calls of a recorded evaluation rollout, made again in a fresh episode, end in the recorded score."""
    recorded = max(rollouts(folder, "evaluations/final"), key=lambda rollout: rollout["total_reward"])
    calls = [
        called(text)
        for step in recorded["steps"]
        for name, text in step["logs"].items()
        if name.startswith("tool_call_") and text.startswith(("read_day(", "submit_schedule("))
    ]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    scored = asyncio.run(play(recorded["steps"][-1]["logs"]["task"], calls))

    assert calls
    assert scored == pytest.approx(recorded["total_reward"])


def called(text: str) -> tuple[str, dict[str, Any]]:
    name, _, arguments = text.removesuffix(")").partition("(")
    return name, json.loads(arguments)


async def play(task: str, calls: list[tuple[str, dict[str, Any]]]) -> float:
    """The score of an episode of `task` that makes `calls`, by the framework alone."""
    with namespace_routing():
        prepared = await asyncio.to_thread(prepare_bundle, GRIDSIM, tasks=[task], played=True, sandbox="local")
        [(_, played)] = prepared.tasks
        episode = await EpisodeSpec.from_task(played).start(sandbox="local")
        turn = await episode.next_turn()
        assert turn is not None
        async with turn.tools() as tools:
            for name, arguments in calls:
                await tools.call(name, arguments)
        await turn.end()
        return (await episode.result())["profit"]


def test_ctrl_c_stops_within_30_seconds_and_leaves_nothing(runs: Path) -> None:
    """Interrupted amid its episodes, a run tears them down and ends; its service ends with it."""
    with subprocess.Popen(
        command(runs, "stopped"), env=without_service(), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        try:
            sandboxes = wait_for_sandboxes(process)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            process.wait(timeout=60)
        finally:
            process.kill()

    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "agentenv-tinker: interrupted"
    assert time.monotonic() - began < 30
    assert sandboxes.isdisjoint(running_sandboxes())
    assert not session_processes(process.pid)


def wait_for_sandboxes(process: subprocess.Popen[str]) -> set[str]:
    """The containers of the run's first episodes."""
    others = running_sandboxes()
    for _ in range(300):
        assert process.poll() is None
        if started := running_sandboxes() - others:
            return started
        time.sleep(0.5)
    raise AssertionError("no sandbox came up within 150 s")


def running_sandboxes() -> set[str]:
    listed = subprocess.run(
        ["docker", "ps", "-aq", "--filter", "name=^agent-local-", "--filter", "name=^agentenv-pool-"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(listed.stdout.split())


def session_processes(leader: int) -> list[str]:
    """The processes that the run started and left."""
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.split()[0] == str(leader)]
