"""Weights that leave the service: exported, encrypted, and fetched from addresses that need no key."""

import json
import time
import urllib.error
import urllib.request

import pyrage
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from tinker_cookbook import weights as cookbook

from tinker_local import exports, weights

TEXT = [72, 101, 108, 108, 111]
FILES = ["adapter_config.json", "adapter_model.safetensors"]

pytestmark = pytest.mark.skipif(
    not hasattr(tinker.TrainingClient, "save_weights_external"), reason="this SDK can't ask for exports"
)


@pytest.fixture
def trained(training, datum):
    """A run after one step."""
    training.forward_backward([datum(TEXT)], "cross_entropy").result(timeout=60)
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)
    return training


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as response:
        return response.read()


def refusal(url: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(url)
    return caught.value.code, json.loads(caught.value.read())["detail"]


def peft_logprobs(folder) -> list[float]:
    network = PeftModel.from_pretrained(weights.load("tiny", progress=print).network, folder)
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([TEXT[:-1]])).logits[0]
    return torch.log_softmax(logits, -1)[range(4), TEXT[1:]].tolist()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")  # PEFT's, of this model
@pytest.mark.parametrize("kind", ["weights", "external_weights"])
def test_the_cookbook_downloads_an_adapter_that_plain_peft_loads(
    service, trained, datum, tmp_path, monkeypatch, rest, kind
):
    """Its download of a training state, by an encrypted export, and of an export leaves what PEFT reads alone."""
    monkeypatch.setenv("TINKER_BASE_URL", service.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    save = trained.save_state if kind == "weights" else trained.save_weights_external
    cookbook.download(tinker_path=save("final").result(timeout=60).path, output_dir=str(tmp_path))
    expected = trained.forward([datum(TEXT)], "cross_entropy").result(timeout=60).loss_fn_outputs[0]["logprobs"]
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert peft_logprobs(tmp_path) == pytest.approx(expected.tolist(), abs=1e-4)
    newest = rest.list_training_runs(limit=1).result(timeout=30).training_runs[0].training_run_id
    left = rest.list_checkpoints(newest).result(timeout=30).checkpoints
    assert [entry.checkpoint_id for entry in left] == ([] if kind == "weights" else ["external_weights/final"])


def test_an_export_is_a_checkpoint_of_its_own_kind(trained, rest):
    """It is listed with its size and end, its files are fetched without a key, and it can be deleted."""
    path = trained.save_weights_external("out", ttl_seconds=7200).result(timeout=60).path
    (listed,) = rest.list_checkpoints(trained.model_id).result(timeout=30).checkpoints
    found = rest.get_external_weights_urls(path).result(timeout=30)
    assert (listed.checkpoint_type, listed.checkpoint_id, listed.tinker_path) == (
        "external",
        "external_weights/out",
        path,
    )
    assert (listed.expires_at - listed.time).total_seconds() == pytest.approx(7200, abs=1)
    assert (found.expires.timestamp() - time.time()) == pytest.approx(3600, abs=60)
    assert sorted(found.urls) == FILES
    assert sum(len(fetch(url)) for url in found.urls.values()) == listed.size_bytes
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=30)
    assert refusal(found.urls[FILES[0]])[0] == 404


def test_an_export_can_be_read_by_its_recipients_alone(trained, rest):
    """Every file is encrypted to each recipient."""
    readers = [pyrage.x25519.Identity.generate() for _ in range(2)]
    path = (
        trained.save_weights_external("out", age_encryption_recipients=[str(reader.to_public()) for reader in readers])
        .result(timeout=60)
        .path
    )
    urls = rest.get_external_weights_urls(path).result(timeout=30).urls
    assert sorted(urls) == [f"{name}.age" for name in FILES]
    config = fetch(urls["adapter_config.json.age"])
    assert [json.loads(pyrage.decrypt(config, [reader]))["r"] for reader in readers] == [4, 4]
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(config, [pyrage.x25519.Identity.generate()])


def test_an_address_holds_for_its_file_alone(trained, rest):
    """An address with another file, time or signature is refused with a sentence."""
    path = trained.save_weights_external("out").result(timeout=60).path
    url = rest.get_external_weights_urls(path).result(timeout=30).urls["adapter_config.json"]
    changed = [
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("adapter_config.json", "manifest.json"),
        url.replace("expires=", "expires=9"),
        url.partition("?")[0],
    ]
    told = "this address was not given by this service since its start: ask for a new one"
    assert [refusal(other) for other in changed] == [(403, told)] * 4


def test_an_address_expires(monkeypatch):
    """Once its time is over an address is refused, whoever signed it."""
    addresses = exports.Addresses()
    urls, expires = addresses.sign("http://here/", "tinker://run/external_weights/out", ["file"])
    signature = urls["file"].rpartition("signature=")[2]
    addresses.check("run/external_weights/out/file", str(expires), signature)
    monkeypatch.setattr(time, "time", lambda: expires + 1.0)
    with pytest.raises(exports.ForbiddenError, match="has expired"):
        addresses.check("run/external_weights/out/file", str(expires), signature)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"age_encryption_recipients": ["nobody"]}, "no age recipient: nobody"),
        ({"age_encryption_recipients": ["age1x"]}, "no age recipient: age1x"),
        ({"age_encryption_recipients": ["age1x"] * 11}, "11 age recipients are given: 10 at most"),
        ({"ttl_seconds": 0}, "ttl_seconds is 0"),
        ({"ttl_seconds": 10**18}, "ttl_seconds is 1000000000000000000"),
    ],
    ids=["recipient", "key", "many", "ended", "eternal"],
)
def test_an_export_that_can_not_be_is_refused(trained, options, sentence):
    """A faulty option is named at once, and the run goes on."""
    with pytest.raises(tinker.BadRequestError, match=sentence):
        trained.save_weights_external("out", **options).result(timeout=60)
    assert trained.save_weights_external("out").result(timeout=60).path.endswith("/external_weights/out")


def test_an_export_is_neither_sampled_nor_trained(trained, client, ready):
    """Its files may be encrypted, so nothing but a download starts from it."""
    path = trained.save_weights_external("out").result(timeout=60).path
    with pytest.raises(tinker.BadRequestError, match="be sampled from"):
        ready(client.create_sampling_client(model_path=path))
    with pytest.raises(tinker.RequestFailedError, match="holds no training state"):
        ready(client.create_training_client_from_state(path))
