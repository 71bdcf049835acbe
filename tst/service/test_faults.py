"""What breaks while the service runs: each is an error of its request, and everyone else goes on."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tinker
from tinker import types

from tinker_local import server
from tinker_local.checkpoints import Store
from tinker_local.service import Served, Service

TEXT = [72, 101, 108, 108, 111]


@pytest.fixture
def others_go_on(client, datum, sample, ready):
    """After the test, a run and a sampler of before it still answer."""
    run = ready(client.create_lora_training_client("tiny", rank=1, seed=1))
    sampler = ready(client.create_sampling_client(base_model="tiny"))
    before = run.forward([datum(TEXT)], "cross_entropy").result(timeout=60).metrics
    yield
    assert run.forward([datum(TEXT)], "cross_entropy").result(timeout=60).metrics == before
    assert len(sample(sampler, TEXT, 2).sequences) == 2


def test_what_is_not_served_is_told_at_once(rest, training, others_go_on):
    """The SDK raises with the sentence; it does not try again for minutes."""
    path = training.save_state("state").result(timeout=60).path
    with pytest.raises(tinker.NotFoundError, match=r"publish is not served here; see docs/tinker-local\.md"):
        rest.publish_checkpoint_from_tinker_path(path).result(timeout=20)


def test_weights_that_are_no_numbers_are_told(training, datum, ready, sample, others_go_on):
    """A run whose weights overflowed fails its passes and its samples with a sentence."""
    training.forward_backward([datum(TEXT)], "cross_entropy").result(timeout=60)
    training.optim_step(types.AdamParams(learning_rate=1e30)).result(timeout=60)
    with pytest.raises(tinker.RequestFailedError, match="cross_entropy loss is nan: the run's gradients"):
        training.forward_backward([datum(TEXT)], "cross_entropy").result(timeout=60)
    sampler = ready(training.save_weights_and_get_sampling_client())
    with pytest.raises(tinker.RequestFailedError, match="log-probabilities that are not finite"):
        sample(sampler, TEXT)


def test_a_prompt_over_the_context_is_told(training, datum, client, ready, sample, others_go_on):
    """Neither sampling nor training takes more tokens than the model can."""
    base = ready(client.create_sampling_client(base_model="tiny"))
    with pytest.raises(tinker.RequestFailedError, match="exceeds the model's context window: 4097"):
        sample(base, [1] * 4097, max_tokens=1)
    with pytest.raises(tinker.RequestFailedError, match=r"data\[0\]: 4097 tokens, over the model's context of 4096"):
        training.forward([datum([1] * 4098)], "cross_entropy").result(timeout=60)


def test_an_empty_batch_is_told(training, others_go_on):
    """A pass over no data is an error, not a loss of zero."""
    with pytest.raises((tinker.BadRequestError, ValueError), match=r"(?i)no data|empty|at least one"):
        training.forward_backward([], "cross_entropy").result(timeout=60)


def test_an_empty_prompt_is_told(client, ready, sample, others_go_on):
    """There is nothing to go on from."""
    base = ready(client.create_sampling_client(base_model="tiny"))
    with pytest.raises(tinker.RequestFailedError, match="the prompt is empty"):
        sample(base, [])


@pytest.mark.parametrize("count", [0, 10**9])
def test_a_number_of_samples_that_can_not_be_is_told(client, ready, sample, count, others_go_on):
    """A group has a size, and a largest one."""
    base = ready(client.create_sampling_client(base_model="tiny"))
    with pytest.raises(tinker.BadRequestError, match=f"num_samples is {count}: it must be 1 to"):
        sample(base, TEXT, count)


def test_a_body_over_the_limit_is_told(service, others_go_on):
    """The SDK raises with the limit."""
    with pytest.raises(tinker.APIStatusError, match="the body is over 64 MB"):
        tinker.ServiceClient({"much": "x" * (65 << 20)}, base_url=service.url, api_key="tml-test").holder  # noqa: B018


@pytest.mark.parametrize(("file", "kept"), [("manifest.json", 5), ("adapter_model.safetensors", 100)])
def test_a_half_written_checkpoint_is_told(service, client, training, ready, sample, file, kept, others_go_on):
    """Neither training nor sampling starts from one, and the run that wrote it goes on."""
    folders = {}
    for kind, save in (("weights", training.save_state), ("sampler_weights", training.save_weights_for_sampler)):
        folders[kind] = (
            save("half").result(timeout=60).path,
            service.data / "runs" / training.model_id / kind / "half" / file,
        )
        folders[kind][1].write_bytes(folders[kind][1].read_bytes()[:kept])
    errors = (tinker.RequestFailedError, tinker.APIStatusError)
    with pytest.raises(errors, match=f"half/{file} can't be read"):
        ready(client.create_training_client_from_state(folders["weights"][0]))
    with pytest.raises(errors, match=f"half/{file} can't be read"):
        sample(ready(client.create_sampling_client(model_path=folders["sampler_weights"][0])), TEXT)
    assert training.save_state("half", overwrite=True).result(timeout=60).path == folders["weights"][0]
    ready(client.create_training_client_from_state(folders["weights"][0]))


@contextmanager
def cramped(folder, *, kilobytes: int) -> Iterator[str]:
    """A service that can write no file larger than that."""
    command = f"ulimit -f {kilobytes}; exec {sys.executable} -m tinker_local --model tiny --port 0 --data {folder}"
    process = subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path, datum, ready):
    """A save that does not fit fails alone; smaller ones, and what was saved before, are whole."""
    with cramped(tmp_path, kilobytes=100) as url:
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        small, large = (ready(client.create_lora_training_client("tiny", rank=rank)) for rank in (1, 64))
        before = small.save_state("kept").result(timeout=60).path
        for save in (large.save_state, large.save_weights_for_sampler):
            with pytest.raises(tinker.RequestFailedError, match=r"the data folder can't be written: .*File too large"):
                save("lost").result(timeout=60)
        with pytest.raises(tinker.RequestFailedError, match="the data folder can't be written"):
            ready(large.save_weights_and_get_sampling_client())
        after = small.save_state("more").result(timeout=60).path
        listed = client.create_rest_client().list_user_checkpoints().result(timeout=30).checkpoints
        assert sorted(entry.tinker_path for entry in listed) == sorted([before, after])
        assert large.forward([datum(TEXT)], "cross_entropy").result(timeout=60).metrics["loss:sum"] > 0
        ready(client.create_training_client_from_state(before))


class DyingBackend:
    """A backend that a bug ends at the first operation."""

    sampling = False

    def run(self, operation):
        raise SystemError("broken")
        yield


def test_a_dead_worker_shows_in_health_and_fails_what_waits(tmp_path, ready):
    """Clients are told at once instead of waiting, and health says why."""
    served = Served(("tiny",), "none", 10, {}, str(tmp_path))
    service = Service(served, Store(tmp_path), DyingBackend(), key=None)
    with server.running(service) as url:
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        with pytest.raises(tinker.RequestFailedError, match="worker died of SystemError: broken; restart the service"):
            ready(client.create_lora_training_client("tiny", rank=1))
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=20)
        assert caught.value.code == 503
        assert "died of SystemError" in json.loads(caught.value.read())["detail"]
