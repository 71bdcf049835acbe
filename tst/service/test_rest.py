"""Runs, checkpoints, samplers and sessions through the SDK's RestClient."""

import io
import json
import tarfile
import time
import urllib.request

import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types

from tinker_local import weights

TEXT = [72, 101, 108, 108, 111]


@pytest.fixture
def saved(training, datum):
    """A trained run with one checkpoint of each kind."""
    training.forward_backward([datum(TEXT)], "cross_entropy").result(timeout=60)
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)
    state = training.save_state("state-1", user_metadata={"step": "1"}).result(timeout=60)
    sampler = training.save_weights_for_sampler("sampler-1", ttl_seconds=3600).result(timeout=60)
    return training, state.path, sampler.path


def test_a_run_tells_its_model_and_last_checkpoints(rest, saved):
    """A run's record names its base model, rank and newest checkpoint of each kind."""
    training, state, sampler = saved
    run = rest.get_training_run(training.model_id).result(timeout=30)
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (training.model_id, "tiny", True, 4)
    assert (run.last_checkpoint.tinker_path, run.last_sampler_checkpoint.tinker_path) == (state, sampler)


def test_runs_are_listed_newest_first_in_pages(rest, client, ready):
    """Pages of one run each give the newest runs in order."""
    first, second = (ready(client.create_lora_training_client("tiny", rank=1)) for _ in range(2))
    pages = [rest.list_training_runs(limit=1, offset=offset).result(timeout=30) for offset in (0, 1)]
    assert [page.training_runs[0].training_run_id for page in pages] == [second.model_id, first.model_id]
    assert pages[0].cursor.total_count >= 2


def test_checkpoints_are_listed_with_their_metadata(rest, saved):
    """A run's checkpoints tell their kind, size, metadata and expiry."""
    training, state, sampler = saved
    found = rest.list_checkpoints(training.model_id).result(timeout=30).checkpoints
    kinds = [(entry.checkpoint_type, entry.checkpoint_id, entry.tinker_path) for entry in found]
    assert kinds == [("training", "weights/state-1", state), ("sampler", "sampler_weights/sampler-1", sampler)]
    assert found[0].user_metadata == {"step": "1"}
    assert found[0].expires_at is None
    assert (found[1].expires_at - found[1].time).total_seconds() == pytest.approx(3600, abs=1)
    assert all(entry.size_bytes > 0 for entry in found)


def test_all_checkpoints_are_listed_newest_first(rest, saved):
    """The list over all runs starts with what was saved last."""
    listed = rest.list_user_checkpoints(limit=2).result(timeout=30).checkpoints
    assert [entry.tinker_path for entry in listed] == [saved[2], saved[1]]


def test_a_deleted_checkpoint_is_gone(rest, client, saved, ready):
    """After deletion a checkpoint is neither listed nor loaded."""
    training, state, sampler = saved
    rest.delete_checkpoint_from_tinker_path(state).result(timeout=30)
    left = rest.list_checkpoints(training.model_id).result(timeout=30).checkpoints
    assert [entry.tinker_path for entry in left] == [sampler]
    with pytest.raises(tinker.NotFoundError, match="state-1"):
        ready(client.create_training_client_from_state(state))


def test_a_checkpoint_can_be_given_an_end(rest, saved):
    """A checkpoint whose time has come is gone."""
    rest.set_checkpoint_ttl_from_tinker_path(saved[1], 1).result(timeout=30)
    time.sleep(1.1)
    with pytest.raises(tinker.NotFoundError, match="state-1"):
        rest.get_weights_info_by_tinker_path(saved[1]).result(timeout=30)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")  # PEFT's, of this model
def test_an_archive_is_an_adapter_that_plain_peft_loads(service, saved, datum, tmp_path):
    """PEFT on the same base model computes with the archive what the service computes."""
    training = saved[0]
    url = f"{service.url}/api/v1/training_runs/{training.model_id}/checkpoints/sampler_weights/sampler-1/archive"
    request = urllib.request.Request(url, headers={"X-API-Key": "tml-test"})
    with urllib.request.urlopen(request) as response, tarfile.open(fileobj=io.BytesIO(response.read())) as archive:
        archive.extractall(tmp_path, filter="data")
    network = PeftModel.from_pretrained(weights.load("tiny", progress=print).network, tmp_path)
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([TEXT[:-1]])).logits[0]
    expected = torch.log_softmax(logits, -1)[range(4), TEXT[1:]].tolist()
    output = training.forward([datum(TEXT)], "cross_entropy").result(timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_sampler_tells_what_it_samples(rest, client, saved, ready):
    """A sampler's record names its model and its checkpoint."""
    sampler = ready(client.create_sampling_client(model_path=saved[2]))
    found = rest.get_sampler(sampler._sampling_session_id).result(timeout=30)
    assert (found.base_model, found.model_path) == ("tiny", saved[2])


def test_a_session_lists_its_runs_and_samplers(service, rest, ready):
    """A session's record has its name, metadata, runs and samplers."""
    client = tinker.ServiceClient({"who": "me"}, display_name="mine", base_url=service.url, api_key="tml-test")
    run = ready(client.create_lora_training_client("tiny", rank=1))
    sampler = ready(client.create_sampling_client(base_model="tiny"))
    session_id = client.holder.get_session_id()
    session = rest.get_session(session_id).result(timeout=30)
    client.close("success").result(timeout=30)
    assert session_id in rest.list_sessions().result(timeout=30).sessions
    assert (session.training_run_ids, session.sampler_ids) == ([run.model_id], [sampler._sampling_session_id])
    assert (session.user_metadata, session.display_name) == ({"who": "me"}, "mine")


def test_a_finished_session_takes_nothing_more(service):
    """After its client closed it, a session refuses new runs."""
    client = tinker.ServiceClient(base_url=service.url, api_key="tml-test")
    session_id = client.holder.get_session_id()
    client.close("success").result(timeout=30)
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 1}}
    request = urllib.request.Request(
        f"{service.url}/api/v1/create_model", json.dumps(body).encode(), {"X-API-Key": "tml-test"}
    )
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(request)


def test_a_resumed_run_goes_on_exactly(client, training, datum, ready):
    """Weights and optimizer state come back to the last bit that a loss shows."""
    step = types.AdamParams(learning_rate=1e-2)
    for _ in range(3):
        training.forward_backward([datum(TEXT)], "cross_entropy").result(timeout=60)
        training.optim_step(step).result(timeout=60)
    path = training.save_state("middle").result(timeout=60).path
    resumed = ready(client.create_training_client_from_state_with_optimizer(path))
    weights_only = ready(client.create_training_client_from_state(path))
    losses = []
    for run in (training, resumed, weights_only):
        found = []
        for _ in range(2):
            found.append(run.forward_backward([datum(TEXT)], "cross_entropy").result(timeout=60).metrics["loss:sum"])
            run.optim_step(step).result(timeout=60)
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert losses[2][0] == pytest.approx(losses[0][0], abs=1e-6)
    assert losses[2][1] != pytest.approx(losses[0][1], abs=1e-6)


def test_a_checkpoint_is_not_overwritten_unasked(training):
    """A second save under a name fails, unless it says overwrite."""
    training.save_state("same").result(timeout=60)
    with pytest.raises(tinker.RequestFailedError, match="overwrite=True"):
        training.save_state("same").result(timeout=60)
    assert training.save_state("same", overwrite=True).result(timeout=60).path.endswith("/weights/same")
