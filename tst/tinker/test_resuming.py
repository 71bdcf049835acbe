"""A training run that was interrupted and goes on: the same steps as of one that was never stopped."""

import json
import logging
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import tinker
from stand_in import service
from stand_in.bundles import task, write_bundle
from stand_in.model import MODEL, RENDERER

from agentenv_tinker.config import EvalConfig, RunConfig
from agentenv_tinker.errors import BundleError, ConfigError, TrainingError
from agentenv_tinker.preparation import prepared
from agentenv_tinker.recipe import write_recipe
from agentenv_tinker.training import resume, train

TASKS = {f"write-{n}": task(f"Write {n}.") for n in range(6)}


class Training(service.TrainingClient):
    """A client that keeps the tokens which each optimizer step took in, and what a saved state holds."""

    saved: ClassVar[dict[str, tuple]] = {}
    stops_at: ClassVar[int | None] = None

    def __init__(self, steps=()):
        self.steps, self.gathered = tuple(steps), ()

    def forward_backward(self, data, **more):
        if len(self.steps) == Training.stops_at:
            raise tinker.APIConnectionError(message="the service went away", request=None)
        self.gathered += tuple(sorted(tuple(datum.model_input.to_ints()) for datum in data))
        return super().forward_backward(data, **more)

    def optim_step(self, params):
        self.steps, self.gathered = (*self.steps, self.gathered), ()
        return super().optim_step(params)

    def save_state(self, name, **_):
        path = f"tinker://run-{len(Training.saved)}/weights/{name}"
        Training.saved[path] = self.steps
        return service.Future(SimpleNamespace(path=path))


class Rest(service.RestClient):
    async def get_weights_info_by_tinker_path(self, path):
        if path not in Training.saved:
            response = SimpleNamespace(request=SimpleNamespace(method="GET", url=""), status_code=404, headers={})
            raise tinker.NotFoundError("gone", response=response, body=None)

    async def delete_checkpoint_from_tinker_path_async(self, path):
        del Training.saved[path]

    delete_checkpoint_from_tinker_path = delete_checkpoint_from_tinker_path_async


class Service(service.ServiceClient):
    def create_rest_client(self):
        return Rest()

    async def create_lora_training_client_async(self, *_, **__):
        return Training()

    async def create_training_client_from_state_with_optimizer_async(self, path, **_):
        return Training(Training.saved[path])

    # as the cookbook calls them since 0.6
    create_lora_training_client = create_lora_training_client_async
    create_training_client_from_state_with_optimizer = create_training_client_from_state_with_optimizer_async


@pytest.fixture(autouse=True)
def stand_in_service(monkeypatch):
    """A hosted service is the one thing that isn't there. The cookbook also takes over the process's logging."""
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.setenv("TINKER_API_KEY", "tml-stand-in")
    monkeypatch.setattr(tinker, "ServiceClient", Service)
    monkeypatch.setattr(tinker, "RestClient", Rest)  # which the cookbook makes by itself since 0.6
    monkeypatch.setattr("agentenv_tinker.report.plots", lambda history: [])  # half the time of a run so short
    monkeypatch.setattr(Training, "saved", {})
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    evals = {"train": ["write-0", "write-1", "write-2", "write-3"], "held_out": ["write-4", "write-5"]}
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b", TASKS, evals=evals)


def settings(bundle, runs, **more):
    """Five steps of two episodes, a state after every second, an evaluation before the first and the third."""
    given = {"steps": 5, "groups_per_batch": 1, "group_size": 2, "save_every": 2, "eval_every": 2, "max_tokens": 1000}
    stand_ins = {"model": MODEL, "renderer": RENDERER, "sandbox": "in_process"}
    return RunConfig(bundle=bundle, runs=runs, run="r", **{**given, **stand_ins, **more})


async def interrupted(bundle, runs, *, at, said=None, **more):
    """The folder of a run that the service left in the middle of step `at`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "stops_at", at)
        with pytest.raises(TrainingError, match="the service went away"):
            await train(settings(bundle, runs, **more), say=(said if said is not None else []).append)
    return runs / "r"


def final(folder):
    """The optimizer steps behind a run's final state."""
    last = json.loads((folder / "checkpoints.jsonl").read_text().splitlines()[-1])
    assert last["name"] == "final"
    return Training.saved[last["state_path"]]


def steps_told(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("at", [0, 2, 3])
async def test_a_resumed_run_takes_the_steps_of_one_that_was_never_stopped(bundle, tmp_path, at):
    """Each step once, in the same order, wherever it was stopped; and nothing but the final state is left."""
    whole = await train(settings(bundle, tmp_path / "whole"), say=lambda line: None)
    steps = final(whole.folder)
    folder = await interrupted(bundle, tmp_path / "stopped", at=at)

    resumed = await resume(folder, say=lambda line: None)

    assert final(folder) == steps
    assert len(steps) == 5
    assert steps_told(folder)[:5] == [0, 1, 2, 3, 4]
    assert (resumed.before.mean, resumed.after.mean) == (whole.before.mean, whole.after.mean)
    assert json.loads((folder / "summary.json").read_text())["checkpoint"] == resumed.checkpoint


async def test_an_evaluation_that_was_made_is_not_made_again(bundle, tmp_path, monkeypatch):
    """The one before the step that comes next, with its page, and those of other steps."""
    folder = await interrupted(bundle, tmp_path, at=2)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("iteration_*/eval_*")}
    assert {path.parent.name for path in before} == {"iteration_000000", "iteration_000002"}

    await resume(folder, say=lambda line: None)

    assert {path: path.stat().st_mtime_ns for path in before} == before
    evaluations = {path.stem for path in (folder / "evaluations").glob("*.json")}
    assert {"final", "step-0", "step-2", "step-4"} <= evaluations


async def test_a_run_that_lacks_only_its_final_evaluation_trains_no_more(bundle, tmp_path, monkeypatch):
    """Its final state is the one that it had."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.ServiceClient, "create_sampling_client_async", _unreachable)
        with pytest.raises(TrainingError, match="the service went away"):
            await train(settings(bundle, tmp_path), say=said.append)
    folder = tmp_path / "r"
    assert said[-1] == f"to go on: agentenv-tinker resume {folder}"
    saved = dict(Training.saved)

    await resume(folder, say=said.append)

    assert Training.saved == saved
    assert "resuming: 5 of 5 steps are made" in said


async def _unreachable(self, **_):
    raise tinker.APIConnectionError(message="the service went away", request=None)


async def test_a_run_of_which_nothing_was_saved_begins_again(bundle, tmp_path):
    """With its first evaluation as it was."""
    folder = await interrupted(bundle, tmp_path, at=3, save_every=0)

    await resume(folder, say=lambda line: None)

    assert len(final(folder)) == 5
    assert Counter(steps_told(folder)[:5]) == Counter(range(5))


async def test_a_finished_run_is_refused(bundle, tmp_path):
    """There is nothing to go on with."""
    trained = await train(settings(bundle, tmp_path, steps=1), say=lambda line: None)

    with pytest.raises(ConfigError, match=r"run 'r' is finished: .*/summary.json says what it came to"):
        await resume(trained.folder, say=lambda line: None)


@pytest.mark.parametrize("made", ["nothing", "folder", "evaluation"])
async def test_what_is_no_training_run_is_refused(tmp_path, made):
    """A folder that isn't there, one of something else, and one of another command."""
    folder = tmp_path / "f"
    if made != "nothing":
        folder.mkdir()
    if made == "evaluation":
        config = EvalConfig(bundle="b", run="f", runs=tmp_path)
        (folder / "run.json").write_text(json.dumps(config.to_dict()))
        write_recipe(config, folder / "recipe.toml")

    told = "is the folder of another command than train" if made == "evaluation" else "is not the folder of a training"
    with pytest.raises(ConfigError, match=told):
        await resume(folder, say=lambda line: None)


async def test_settings_that_were_changed_are_refused_and_named(bundle, tmp_path):
    """But for those that make no difference to what is trained."""
    folder = await interrupted(bundle, tmp_path, at=3)
    recipe = folder / "recipe.toml"
    written = recipe.read_text()
    recipe.write_text(written.replace("steps = 5", "steps = 7"))

    with pytest.raises(ConfigError, match="was changed since the run started: steps was 5 and is 7; put it back"):
        await resume(folder, say=lambda line: None)

    recipe.write_text(written.replace("max_concurrent_episodes = 8", "max_concurrent_episodes = 1"))
    await resume(folder, say=lambda line: None)
    assert len(final(folder)) == 5


async def test_a_bundle_that_was_changed_is_refused_and_its_files_named(bundle, tmp_path):
    """A task is another now; a recipe beside the tasks is no matter."""
    own = tmp_path / "b"
    shutil.copytree(bundle, own)
    folder = await interrupted(str(own), tmp_path / "runs", at=3)
    (own / "recipe.toml").write_text("steps = 9\n")
    changed = own / "tasks" / "write-0.json"
    changed.write_text(changed.read_text() + "\n")

    with pytest.raises(BundleError, match=r"was changed since the run started: tasks/write-0.json; put it back"):
        await resume(folder, say=lambda line: None)


async def test_a_state_that_the_service_lost_is_told(bundle, tmp_path, monkeypatch):
    """The run's folder stays as it is."""
    folder = await interrupted(bundle, tmp_path, at=3)
    monkeypatch.setattr(Training, "saved", {})
    metrics = (folder / "metrics.jsonl").read_text()

    with pytest.raises(ConfigError, match=r"the Tinker service doesn't have 'tinker://run-.*/000002', to go on from"):
        await resume(folder, say=lambda line: None)
    assert (folder / "metrics.jsonl").read_text() == metrics


async def test_a_run_that_is_still_under_way_is_refused(bundle, tmp_path):
    """Two processes would train into one folder."""
    folder = await interrupted(bundle, tmp_path, at=3)

    async with prepared(
        settings(bundle, Path(tmp_path)), lambda dataset, _: dataset, say=lambda line: None, resumes=True
    ):
        with pytest.raises(ConfigError, match="is still under way in another process"):
            await resume(folder, say=lambda line: None)
