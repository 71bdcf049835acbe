"""A split played with a fixed model, by the cookbook's rollout functions: what is recorded, and what failed."""

import json
import logging
from importlib import metadata

import pytest
import tinker
from stand_in import service
from stand_in.bundles import task, write_bundle
from stand_in.model import MODEL, RENDERER
from stand_in.play import builder, runs_of
from tinker_cookbook.rl import train

from agentenv_tinker.config import EvalConfig
from agentenv_tinker.errors import ConfigError, EpisodeFailedError
from agentenv_tinker.evaluation import Evaluation, TaskResult
from agentenv_tinker.playing import evaluate, evaluated, recorded_evaluations

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


async def played(bundle, folder, *, split="held", **more):
    """The evaluation of the base model on `split`."""
    dataset = builder(bundle, test_split=split, run_name=folder.name)
    settings = {"checkpoint": None, "label": "untrained", "step": 0, "folder": folder, "max_tokens": 1000, **more}
    return await evaluate(dataset, **settings)


async def test_a_split_is_played_and_a_failing_episode_is_named_and_left_out_of_every_mean(bundle, tmp_path):
    """The mean is that of the three episodes which were scored, and the fourth is there with its reason."""
    evaluation = await played(bundle, tmp_path, thresholds=(0.2,))

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


async def test_samples_of_a_task_are_episodes_of_their_own(bundle, tmp_path):
    """Each is recorded, and one that fails costs no other; the error of the mean is that of the tasks."""
    once = await played(bundle, tmp_path, label="once")
    thrice = await played(bundle, tmp_path, label="thrice", samples=3)

    assert [(task.rewards, task.failed) for task in thrice.tasks] == [
        ((0.4,) * 3, 0),
        ((), 3),
        ((1.0,) * 3, 0),
        ((0.0,) * 3, 0),
    ]
    assert thrice.pass_at == {k: pytest.approx(1 / 3) for k in (1, 2, 3)}
    assert thrice.standard_error == pytest.approx(once.standard_error)


async def test_an_evaluation_leaves_its_records_and_a_page(bundle, tmp_path):
    """The cookbook's own, one line an episode; the framework files the episodes under the evaluation's label."""
    await played(bundle, tmp_path / "labelled", label="warm-start", step=7)

    folder = tmp_path / "labelled"
    assert sorted(path.name for path in folder.iterdir()) == [
        "warm-start.html",
        "warm-start.json",
        "warm-start_rollout_summaries.jsonl",
    ]
    lines = (folder / "warm-start_rollout_summaries.jsonl").read_text().splitlines()
    assert [(record["split"], record["iteration"], record["total_reward"]) for record in map(json.loads, lines)] == [
        ("eval/warm-start", 7, reward) for reward in (0.4, 1.0, 0.0)
    ]
    assert "task: write-4" in (folder / "warm-start.html").read_text()
    runs = runs_of("labelled")
    assert {run.overrides["metadata"]["run_group_id"] for run in runs} == {"labelled/eval/warm-start/step-7"}
    assert [str(run.status) for run in runs].count("COMPLETED") == 3


async def test_the_model_is_the_base_model_or_a_checkpoint_of_it(bundle, tmp_path, monkeypatch):
    """What is sampled from is what was named, at the temperature that was asked for."""
    asked = []
    sample = service.SamplingClient.sample

    def noted(self, **request):
        params = request["sampling_params"]
        asked.append((self.path, params.temperature, params.max_tokens))
        return sample(self, **request)

    monkeypatch.setattr(service.SamplingClient, "sample", noted)
    await played(bundle, tmp_path, label="base")
    trained = await played(bundle, tmp_path, label="trained", checkpoint="tinker://a/b", step=None, temperature=0.0)

    assert set(asked) == {(f"base:{MODEL}", 1.0, 1000), ("tinker://a/b", 0.0, 1000)}
    assert (trained.checkpoint, trained.step, trained.temperature) == ("tinker://a/b", None, 0.0)


async def test_a_checkpoint_of_another_model_is_refused(bundle, tmp_path):
    """Its tokens would be read by the wrong tokenizer."""
    dataset = builder(bundle, test_split="held", model_name="other/model")

    with pytest.raises(ConfigError, match=f"'tinker://a/b' is of model '{MODEL}', not of 'other/model'"):
        await evaluate(dataset, checkpoint="tinker://a/b", label="e", step=0, folder=tmp_path, max_tokens=10)


async def test_a_split_of_which_every_episode_fails_is_an_error(bundle, tmp_path):
    """It says why the first one did."""
    with pytest.raises(EpisodeFailedError, match=f"not one of 1 episode of evaluation 'untrained'.*{BROKEN}"):
        await played(bundle, tmp_path, split="hopeless")


async def test_a_first_prompt_over_the_limit_is_an_episode_of_its_task(bundle, tmp_path):
    """It was cut before its first message, and scored there."""
    dataset = builder(bundle, test_split="held", eval_tasks=1, max_trajectory_tokens=10)

    evaluation = await evaluate(dataset, checkpoint=None, label="e", step=0, folder=tmp_path, max_tokens=10)

    assert evaluation.tasks == (TaskResult(task="write-4", rewards=(0.0,), failed=0),)
    assert (evaluation.rates["cut"], evaluation.per_episode["messages"]) == (1.0, 0.0)


async def test_the_evaluations_that_training_makes_by_itself_are_read_from_its_records(bundle, tmp_path):
    """The one before each step, with the task that failed counted and no part of the mean."""
    dataset = builder(bundle, train_split="train", test_split="held", run_name="trained", log_path=str(tmp_path))
    await train.main(
        train.Config(
            learning_rate=1e-4,
            dataset_builder=dataset,
            model_name=MODEL,
            renderer_name=RENDERER,
            recipe_name="test",
            max_tokens=1000,
            log_path=str(tmp_path),
            max_steps=2,
            eval_every=1,
            save_every=0,
            rollout_error_tolerance=True,
        )
    )

    evaluations = recorded_evaluations(tmp_path, dataset, thresholds=(0.2,))

    assert [(each.label, each.step) for each in evaluations[:2]] == [("step-0", 0), ("step-1", 1)]
    for each in evaluations:
        assert [(task.task, task.rewards, task.failed) for task in each.tasks] == [
            ("write-4", (0.4,), 0),
            ("broken", (), 1),
            ("write-10", (1.0,), 0),
            ("write-0", (0.0,), 0),
        ]
        assert (each.mean, each.failed, each.above) == (pytest.approx(1.4 / 3), 1, {0.2: pytest.approx(2 / 3)})
        assert Evaluation.read(tmp_path / "evaluations" / f"{each.label}.json") == each


def command(bundle, runs, **settings):
    """The settings of an evaluation by command, on the stand-ins."""
    known = {"run": "e", "model": MODEL, "renderer": RENDERER, "sandbox": "in_process", "eval_split": "held"}
    return EvalConfig(bundle=bundle, runs=runs, **{**known, **settings})


@pytest.fixture
def hosted(monkeypatch):
    """A key for the service, and none of its addresses."""
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.setenv("TINKER_API_KEY", "tml-stand-in")


async def test_an_evaluation_by_command_plays_a_runs_last_weights_and_keeps_its_settings(hosted, tmp_path):
    """Its folder holds the settings, the evaluation and the framework's records."""
    bundle = write_bundle(tmp_path / "b", TASKS, evals={"held": ["write-4", "write-10"]})
    trained = tmp_path / "runs" / "trained"
    trained.mkdir(parents=True)
    (trained / "checkpoints.jsonl").write_text(
        json.dumps({"name": "000001", "sampler_path": "tinker://a/old"})
        + "\n"
        + json.dumps({"name": "final", "sampler_path": "tinker://a/last"})
        + "\n"
    )
    said = []

    config = command(bundle, tmp_path / "runs", checkpoint=str(trained), eval_tasks=1, above=(0.2,))
    evaluation = await evaluated(config, say=said.append)

    folder = tmp_path / "runs" / "e"
    assert (evaluation.checkpoint, evaluation.step, evaluation.mean) == ("tinker://a/last", None, 0.4)
    assert evaluation.above == {0.2: 1.0}
    assert Evaluation.read(folder / "evaluation.json") == evaluation
    started = json.loads((folder / "run.json").read_text())
    assert started.pop("versions")["tinker-cookbook"] == metadata.version("tinker-cookbook")
    assert started == json.loads(json.dumps(config.to_dict()))
    assert "playing: 1 x 1 episodes, tinker://a/last" in said


async def test_a_checkpoint_that_is_refused_leaves_nothing_behind(hosted, tmp_path, monkeypatch):
    """The run's name can be used again."""
    bundle = write_bundle(tmp_path / "b", TASKS, evals={"held": ["write-4"]})

    async def other_model(self):
        return "other/model"

    monkeypatch.setattr(service.SamplingClient, "get_base_model_async", other_model)
    with pytest.raises(ConfigError, match="is of model 'other/model'"):
        await evaluated(command(bundle, tmp_path / "runs", checkpoint="tinker://a/b"), say=lambda line: None)

    assert not (tmp_path / "runs").exists()
