"""A split played with a fixed model, by the cookbook's rollout functions: what is recorded, and what failed."""

import json
import logging
from pathlib import Path

import pytest
import tinker
from stand_in import service
from stand_in.bundles import task, write_bundle
from stand_in.model import MODEL, RENDERER
from stand_in.play import builder, runs_of
from tinker_cookbook.rl import train

from agentenv_tinker.errors import ConfigError, EpisodeFailedError
from agentenv_tinker.evaluation import Evaluation, TaskResult
from agentenv_tinker.playing import evaluate, recorded_evaluations

BROKEN = "the verifier broke"
TASKS = {
    "write-0": task("Write 0."),
    "write-4": task("Write 4."),
    "write-10": task("Write 10."),
    "broken": task("Write 1.", preset=-1),
}
HELD = ["write-4", "broken", "write-10", "write-0"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    evals = {"train": ["write-4", "write-10"], "held": HELD, "hopeless": ["broken"]}
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b", TASKS, evals=evals)


@pytest.fixture(autouse=True)
def stand_in_service(monkeypatch):
    """The service is the one thing that isn't there. The cookbook also takes over the process's logging."""
    monkeypatch.setattr(tinker, "ServiceClient", service.ServiceClient)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


async def evaluated(bundle, folder, *, split="held", **more):
    """The evaluation of the base model on `split`."""
    dataset = builder(bundle, test_split=split, run_name=folder.name)
    settings = {"checkpoint": None, "label": "untrained", "step": 0, "folder": folder, "max_tokens": 1000, **more}
    return await evaluate(dataset, **settings)


async def test_a_split_is_played_and_a_failing_episode_is_named_and_left_out_of_every_mean(bundle, tmp_path):
    """The mean is that of the three episodes which were scored, and the fourth is there with its reason."""
    evaluation = await evaluated(bundle, tmp_path, thresholds=(0.2,))

    [broken] = [each for each in evaluation.tasks if each.task == "broken"]
    assert BROKEN in " ".join(broken.errors)
    assert evaluation == Evaluation(
        label="untrained",
        step=0,
        model=MODEL,
        checkpoint=None,
        split="held",
        samples=1,
        temperature=1.0,
        episodes=3,
        failed=1,
        mean=pytest.approx(1.4 / 3),
        standard_error=pytest.approx(0.290593, abs=1e-6),
        pass_threshold=1.0,
        pass_at={1: pytest.approx(1 / 3)},
        above={0.2: pytest.approx(2 / 3)},
        scores={"score": pytest.approx(1.4 / 3)},
        rates={"cut": 0.0, "parse_error": 0.0, "tool_error": 0.0},
        stop_reasons={"completed": 3},
        per_episode=evaluation.per_episode,
        tasks=(
            TaskResult(task="write-4", rewards=(0.4,), failed=0),
            TaskResult(task="broken", rewards=(), failed=1, errors=broken.errors),
            TaskResult(task="write-10", rewards=(1.0,), failed=0),
            TaskResult(task="write-0", rewards=(0.0,), failed=0),
        ),
    )
    assert Evaluation.read(tmp_path / "untrained.json") == evaluation
