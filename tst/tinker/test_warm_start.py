"""Demonstrations replayed as rollouts, and the cookbook's supervised loop over them."""

import json
import logging
from types import SimpleNamespace
from typing import ClassVar

import pytest
import tinker
from stand_in import service
from stand_in.bundles import task, write_bundle
from stand_in.model import MODEL, RENDERER, Script, call
from stand_in.play import builder, play, runs_of
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.rl.data_processing import trajectory_to_data

from agentenv_tinker.config import WarmStartConfig
from agentenv_tinker.demonstrations import DemonstratedCall, DemonstratedTurn, Demonstration
from agentenv_tinker.errors import BundleError, ConfigError, EpisodeFailedError
from agentenv_tinker.replay import recorded_demonstrations, replay
from agentenv_tinker.warm_start import given_checkpoint, warm_start

TASKS = {
    "note": task("Write 2."),
    "twice": task("Write 1.", "Write 1 more."),
    "broken": task("Write 1.", preset=-1),
    **{f"day-{n}": task(f"Write {n}.") for n in range(6)},
}
NOTE = Demonstration(
    "note",
    (
        DemonstratedTurn(
            (DemonstratedCall("note", {"text": "a"}), DemonstratedCall("note", {"text": "b"})), "All noted."
        ),
    ),
)
MESSAGES = (call("note", text="a"), call("note", text="b"), "All noted.")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b", TASKS, evals={"train": list(TASKS), "one": ["note"]})


def only(*turns, of="note"):
    """A demonstration that makes a note in each of `turns`."""
    return Demonstration(of, tuple(DemonstratedTurn((DemonstratedCall("note", {"text": text}),)) for text in turns))


async def test_what_is_taught_is_what_rl_trains_on_token_by_token(bundle):
    """A model that says in a rollout what the demonstration says is trained on the same tokens with the same mask."""
    [replayed] = await replay([NOTE], builder(bundle, train_split="one"), "one")
    played = await play(bundle, Script(*MESSAGES), train_split="one")

    [taught] = [example.datum() for example in replayed.examples]
    [trained] = trajectory_to_data(played.trajectory, 1.0)
    assert replayed.reward == played.reward == 0.2
    assert taught.model_input.to_ints() == trained.model_input.to_ints()
    assert taught.loss_fn_inputs["target_tokens"].data == trained.loss_fn_inputs["target_tokens"].data
    assert taught.loss_fn_inputs["weights"].data == trained.loss_fn_inputs["mask"].data


async def test_what_is_taught_is_what_the_cookbook_makes_of_the_conversation(bundle):
    """The example is the renderer's own supervised example of all that the assistant said."""
    settings = builder(bundle, train_split="one")
    [replayed] = await replay([NOTE], settings, "one")
    played = await play(bundle, Script(*MESSAGES), train_split="one")

    tokens, weights = settings.renderer().build_supervised_example(played.messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    [example] = replayed.examples
    assert list(example.tokens) == tokens.to_ints()
    assert list(example.weights) == weights.tolist()


async def test_a_demonstration_of_several_turns_ends_each(bundle):
    """The reply of a turn comes before the next prompt."""
    [replayed] = await replay([only("a", "b", of="twice")], builder(bundle, train_split="train"), "train")

    assert replayed.reward == 0.2
    assert "".join(map(chr, replayed.examples[0].tokens)).count("Done.") == 2


@pytest.mark.parametrize(
    ("demonstration", "told"),
    [
        (only("a", of="twice"), "the episode has more turns than the demonstration"),
        (only("a", "b"), "the episode was over before the demonstration was"),
        (only("a", of="broken"), "the verifier broke"),
    ],
    ids=["too short", "too long", "failed"],
)
async def test_a_demonstration_that_fails_teaches_nothing_and_says_why(bundle, demonstration, told):
    """It has no reward and no example."""
    [replayed] = await replay([demonstration], builder(bundle, train_split="train"), "train")

    assert (replayed.reward, replayed.examples) == (None, ())
    assert told in replayed.error


async def test_replayed_episodes_are_filed_under_the_warm_start(bundle):
    """The explorer shows them apart from those of training."""
    await replay([NOTE], builder(bundle, train_split="one", run_name="filed"), "one")

    assert [run.overrides["metadata"]["run_group_id"] for run in runs_of("filed")] == ["filed/warm-start/step-0"]


async def test_recorded_runs_are_demonstrations_too(tmp_path):
    """What a model did in runs that completed, each way of playing a task once, is what the replay takes."""
    recorded = write_bundle(tmp_path / "b", {"broken": TASKS["broken"], "note": TASKS["note"]}, evals={"one": ["note"]})
    await play(recorded, Script(*MESSAGES), train_split="one")
    await play(recorded, Script(*MESSAGES), train_split="one")
    with pytest.raises(EpisodeFailedError):
        await play(recorded, Script("Nothing to do."), train_split="all")

    assert list(recorded_demonstrations(recorded)) == [NOTE]


class Training(service.TrainingClient):
    """A client that keeps which examples each optimizer step took in, and what a saved state holds."""

    saved: ClassVar[dict[str, tuple]] = {}
    stops_at: ClassVar[int | None] = None

    def __init__(self, steps=()):
        self.steps, self.gathered = tuple(steps), ()

    def forward_backward(self, data, **_):
        self.gathered += tuple(len(datum.model_input.to_ints()) for datum in data)
        outputs = [{"logprobs": datum.loss_fn_inputs["weights"]} for datum in data]
        return service.Future(SimpleNamespace(loss_fn_outputs=outputs, metrics={}))

    def optim_step(self, params):
        if len(self.steps) == Training.stops_at:
            raise tinker.APIConnectionError(message="the service went away", request=None)
        self.steps, self.gathered = (*self.steps, self.gathered), ()
        return super().optim_step(params)

    def save_state(self, name, **_):
        path = f"tinker://run/weights/{name}-{len(self.steps)}"
        Training.saved[path] = self.steps
        return service.Future(SimpleNamespace(path=path))


class Rest(service.RestClient):
    def get_weights_info_by_tinker_path(self, path):
        async def answer():
            if path not in Training.saved:
                request = SimpleNamespace(method="POST", url="")
                response = SimpleNamespace(request=request, status_code=404, headers={})
                raise tinker.NotFoundError("gone", response=response, body=None)
            return SimpleNamespace(base_model=MODEL)

        return answer()


class Service(service.ServiceClient):
    def create_rest_client(self):
        return Rest()

    async def create_lora_training_client_async(self, **_):
        return Training()

    async def create_training_client_from_state_with_optimizer_async(self, path, **_):
        return Training(Training.saved[path])

    # as the cookbook calls them since 0.6
    create_lora_training_client = create_lora_training_client_async
    create_training_client_from_state_with_optimizer = create_training_client_from_state_with_optimizer_async


@pytest.fixture
def stand_in_service(monkeypatch):
    """The service is the one thing that isn't there. The cookbook also takes over the process's logging."""
    monkeypatch.setattr(tinker, "ServiceClient", Service)
    monkeypatch.setattr(Training, "saved", {})
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def settings(bundle, tmp_path, **more):
    """The settings of a warm start on the six days, and its dataset."""
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "demonstrations.jsonl"
    calls = [{"name": "note", "arguments": {"text": "x" * 10}}]
    path.write_text("".join(json.dumps({"task": f"day-{n}", "calls": calls * (n + 1)}) + "\n" for n in range(6)))
    given = {"warm_start_steps": 25, "warm_start_batch": 2, "min_score": 0.3, "demonstrations": str(path), **more}
    config = WarmStartConfig(bundle=bundle, runs=tmp_path / "runs", run="r", model=MODEL, renderer=RENDERER, **given)
    return config, builder(bundle, train_split="train", max_turn_messages=8)


async def warm_started(bundle, tmp_path, said=None, **more):
    """The optimizer steps behind a warm start's weights."""
    config, dataset = settings(bundle, tmp_path, **more)
    started = await warm_start(config, dataset, say=(lambda line: None) if said is None else said.append)
    return Training.saved[started.state_path]


async def test_only_what_scores_well_is_learned_from(bundle, tmp_path, stand_in_service):
    """Of the days, those with fewer than three notes score below the bar."""
    said = []
    steps = await warm_started(bundle, tmp_path, said)

    assert "demonstrations: 4 of 6 score 0.3 or more" in said
    assert [len(step) for step in steps] == [2] * 25
    assert len({length for step in steps for length in step}) == 4


async def test_an_interrupted_warm_start_goes_on_at_the_next_batch(bundle, tmp_path, stand_in_service, monkeypatch):
    """It takes each step once, in the order of one that was never stopped, and replays no demonstration again."""
    whole = await warm_started(bundle, tmp_path / "whole")
    monkeypatch.setattr(Training, "stops_at", 17)
    with pytest.raises(tinker.APIConnectionError):
        await warm_started(bundle, tmp_path / "stopped")
    monkeypatch.setattr(Training, "stops_at", None)
    before, said = len(runs_of("run")), []

    assert await warm_started(bundle, tmp_path / "stopped", said) == whole
    assert len(runs_of("run")) == before
    assert not any("step 9/25" in line for line in said)


async def test_a_demonstration_is_replayed_once(bundle, tmp_path, stand_in_service):
    """Other settings for learning take what was replayed, but for a line that a kill cut short."""
    await warm_started(bundle, tmp_path)
    [kept] = (tmp_path / "runs").rglob("replayed.jsonl")
    lines = kept.read_text()
    kept.write_text(lines[: -len(lines) // 20])
    before = len(runs_of("run"))
    await warm_started(bundle, tmp_path, warm_start_learning_rate=1e-5)

    assert len(runs_of("run")) == before + 1
    assert len(kept.read_text().splitlines()) == 6


async def test_a_warm_start_is_made_once(bundle, tmp_path, stand_in_service):
    """The next run of the same settings takes it as it is, and other settings make another."""
    first, said = await warm_started(bundle, tmp_path), []

    assert await warm_started(bundle, tmp_path, said) == first
    assert said[0].startswith("warm start: done before, in ")
    assert len(await warm_started(bundle, tmp_path, warm_start_steps=3)) == 3


async def test_a_warm_start_that_the_service_lost_is_made_again(bundle, tmp_path, stand_in_service, monkeypatch):
    """Weights of another service, or removed there, are no start."""
    first = await warm_started(bundle, tmp_path)
    monkeypatch.setattr(Training, "saved", {})

    assert await warm_started(bundle, tmp_path) == first


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"min_score": 0.9}, "no demonstration scores 0.9 or more; the best scores 0.6"),
        ({"demonstrations": "/nowhere.jsonl"}, "the demonstrations '/nowhere.jsonl' can't be read: "),
    ],
    ids=["none good", "no file"],
)
async def test_nothing_to_learn_from_is_told(bundle, tmp_path, stand_in_service, more, told):
    """It ends before a model is trained."""
    with pytest.raises(BundleError, match=told):
        await warm_started(bundle, tmp_path, **more)
    assert Training.saved == {}


def test_a_run_goes_on_from_a_path_or_from_a_runs_folder(tmp_path):
    """A folder means its last training state; one without any is refused."""
    (tmp_path / "checkpoints.jsonl").write_text('{"name": "final", "state_path": "tinker://run/weights/final"}\n')

    assert given_checkpoint("tinker://a/weights/b") == "tinker://a/weights/b"
    assert given_checkpoint(str(tmp_path)) == "tinker://run/weights/final"
    with pytest.raises(ConfigError, match="neither a tinker:// path nor a folder with a checkpoint"):
        given_checkpoint(str(tmp_path / "none"))
