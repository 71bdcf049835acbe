"""What a client gets for requests that can't be served: the SDK's matching exception and a sentence, at once."""

import http.client
import json
import math
import urllib.error
import urllib.request

import pytest
import tinker
from tinker import types

TEXT = [72, 101, 108, 108, 111]


def post(url: str, path: str, body: bytes, key: str = "tml-test", content_type: str = "application/json"):
    """Return the status and the JSON answer to a request that the SDK would not send."""
    request = urllib.request.Request(url + path, body, {"X-API-Key": key, "Content-Type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize(
    ("inputs", "loss", "sentence"),
    [
        ({"weights": [1.0] * 3}, "cross_entropy", r"data\[0\]: weights has shape \[3\]"),
        (
            {"weights": [1.0, math.nan, 1.0, 1.0]},
            "cross_entropy",
            r"data\[0\]: weights holds a value that is not finite",
        ),
        ({"advantages": [1.0] * 4}, "ppo", r"data\[0\]: loss_fn 'ppo' needs loss_fn_inputs 'logprobs'"),
        ({"weights": [1.0] * 4}, "nonsense", "unknown loss_fn 'nonsense': this service has cispo"),
        ({"weights": [1.0] * 4, "advantages": [1.0] * 4}, "cross_entropy", "takes no loss_fn_inputs 'advantages'"),
    ],
    ids=["length", "nan", "missing", "loss", "extra"],
)
def test_a_datum_that_does_not_fit_is_named(training, datum, inputs, loss, sentence):
    """The future fails with the datum's place and what is wrong with it, and the run goes on."""
    with pytest.raises(tinker.RequestFailedError, match=sentence):
        training.forward_backward([datum(TEXT, **inputs)], loss).result(timeout=60)
    assert training.forward([datum(TEXT)], "cross_entropy").result(timeout=60).metrics["loss:sum"] > 0


@pytest.mark.parametrize("token", [265, -1], ids=["beyond", "negative"])
def test_ids_outside_the_vocabulary_are_named(training, datum, client, sample, token, ready):
    """Neither training nor sampling takes an id that is no token."""
    with pytest.raises(tinker.RequestFailedError, match=f"holds the id {token}: 'tiny' has ids 0 to 264"):
        training.forward([datum([token, 1])], "cross_entropy").result(timeout=60)
    base = ready(client.create_sampling_client(base_model="tiny"))
    with pytest.raises(tinker.RequestFailedError, match="the prompt holds an id outside 0 to 264"):
        sample(base, [token])


def test_an_unknown_option_of_a_loss_is_named(training, datum):
    """A misspelt loss_fn_config is not ignored."""
    data = [datum(TEXT, logprobs=[0.0] * 4, advantages=[1.0] * 4)]
    with pytest.raises(tinker.RequestFailedError, match="no option 'clip_high': it takes clip_high_threshold"):
        training.forward(data, "ppo", {"clip_high": 1.0}).result(timeout=60)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"max_tokens": 5000}, r"exceeds the model's context window: 5 \+ 5000 > 4096"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
    ],
    ids=["context", "tokens", "temperature", "top_p"],
)
def test_sampling_parameters_out_of_range_are_named(client, sample, params, sentence, ready):
    """The sample fails with the parameter's value and its range."""
    base = ready(client.create_sampling_client(base_model="tiny"))
    with pytest.raises(tinker.RequestFailedError, match=sentence):
        sample(base, TEXT, **params)


def test_an_unknown_model_is_named(client, ready):
    """Neither training nor sampling starts on a model that is not served."""
    with pytest.raises(tinker.NotFoundError, match="unknown model 'gpt': this service serves 'tiny'"):
        ready(client.create_lora_training_client("gpt"))
    with pytest.raises(tinker.NotFoundError, match="unknown model 'gpt': this service serves 'tiny'"):
        ready(client.create_sampling_client(base_model="gpt"))


def test_kinds_of_checkpoints_are_not_mixed_up(client, training, ready):
    """Training state can't be sampled from, sampler weights can't be trained on."""
    state = training.save_state("a").result(timeout=60).path
    sampler = training.save_weights_for_sampler("a").result(timeout=60).path
    with pytest.raises(tinker.BadRequestError, match="be sampled from: give weights saved for that"):
        ready(client.create_sampling_client(model_path=state))
    with pytest.raises(tinker.RequestFailedError, match="holds no training state"):
        ready(client.create_training_client_from_state(sampler))


@pytest.mark.parametrize("path", ["tinker://x", "tinker://a/b/c", "tinker://../weights/x"])
def test_a_path_that_is_none_is_refused(client, path, ready):
    """A malformed or escaping path is an error of its own, not a missing file."""
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError), match=r"no checkpoint path|nothing called"):
        ready(client.create_training_client_from_state(path))


@pytest.mark.parametrize("name", ["../x", "a/b", "", " "])
def test_a_checkpoint_can_not_leave_its_folder(service, training, name):
    """A name that is no plain name is refused, or replaced where it is empty."""
    body = {"model_id": training.model_id, "path": name}
    status, answer = post(service.url, "/api/v1/save_weights", json.dumps(body).encode())
    assert (status, "can't name a checkpoint" in str(answer)) == ((400, True) if name else (200, False))


def test_a_key_without_the_prefix_is_refused(service):
    """On loopback any key of the right form will do, and no other."""
    status, answer = post(service.url, "/api/v1/client/config", b"{}", key="wrong")
    assert (status, answer["detail"]) == (
        401,
        "give an API key that starts with 'tml-' (TINKER_API_KEY=tml-local will do)",
    )


@pytest.mark.parametrize(
    ("body", "content_type", "sentence"),
    [
        (b"{", "application/json", "the body is not JSON"),
        (b"[1]", "application/json", "the body must be a JSON object, not list"),
        (b"{}", "application/json", "'forward_backward_input' is missing from the request"),
        (b"\xff\xff", "application/x-protobuf", "the body is no ForwardBackwardRequest"),
        (b"", "application/x-protobuf", "the request holds no data"),
    ],
    ids=["broken", "list", "empty", "proto", "no-data"],
)
def test_a_body_that_can_not_be_read_is_refused(service, body, content_type, sentence):
    """Bodies of another form are a 400 with a sentence."""
    status, answer = post(service.url, "/api/v1/forward_backward", body, content_type=content_type)
    assert status == 400
    assert sentence in answer["detail"]


def test_a_body_over_the_limit_is_refused(service):
    """A body that is too large is refused while it is being sent."""
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=20)
    connection.request("POST", "/api/v1/telemetry", b"x" * ((64 << 20) + 1), {"X-API-Key": "tml-test"})
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["detail"][:22]) == (413, "the body is over 64 MB")
    connection.close()


@pytest.mark.parametrize("path", ["/api/v1/audit", "/api/v1/billing/usage/events", "/nowhere"])
def test_what_is_not_served_says_so(service, path):
    """Endpoints that only the hosted service has answer 501 with a sentence."""
    status, answer = post(service.url, path, b"{}")
    assert (status, answer["detail"]) == (501, f"POST {path} is not served here; see docs/tinker-local.md")


def test_an_unknown_future_is_lost_to_training_and_sent_again_by_sampling(service):
    """A ticket from before a restart is a 404, or for samples the 410 that makes the SDK sample again."""
    body = json.dumps({"request_id": "gone"}).encode()
    assert post(service.url, "/api/v1/retrieve_future", body)[0] == 404
    request = urllib.request.Request(
        service.url + "/api/v1/retrieve_future", body, {"X-API-Key": "tml-x", "X-Tinker-Request-Type": "Sample"}
    )
    with pytest.raises(urllib.error.HTTPError, match="410"):
        urllib.request.urlopen(request, timeout=20)


def test_finished_samples_are_told_in_batches(service, client, ready):
    """retrieve_futures names what is through, once, and waits for nothing with timeout 0."""
    sampler = ready(client.create_sampling_client(base_model="tiny"))
    target = {"sampling_session_id": sampler._sampling_session_id}
    body = {"sampling_params": {"max_tokens": 2}, "prompt": {"chunks": [{"tokens": TEXT}]}, "seq_id": 7}
    asked = post(service.url, "/api/v1/asample", json.dumps({**body, **target}).encode())[1]["request_id"]
    poll = {"target": target, "prev_cursor": 0}
    told = post(service.url, "/api/v1/retrieve_futures", json.dumps(poll).encode())[1]
    later = {**poll, "prev_cursor": told["cursor"], "timeout": 0}
    assert told["completions"] == [{"state": "finished", "request_id": asked}]
    assert post(service.url, "/api/v1/retrieve_futures", json.dumps(later).encode())[1] == {
        "completions": [],
        "cursor": told["cursor"],
    }


def test_images_are_refused(training):
    """Only text tokens are served."""
    image = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
    data = types.Datum(
        model_input=types.ModelInput(chunks=[image]), loss_fn_inputs={"target_tokens": [1], "weights": [1.0]}
    )
    with pytest.raises(tinker.BadRequestError, match="text tokens only, not image"):
        training.forward([data], "cross_entropy").result(timeout=60)


def test_health_answers_without_a_key(service):
    """Anyone on the machine can see that the service is up."""
    with urllib.request.urlopen(f"{service.url}/api/v1/healthz", timeout=20) as response:
        assert json.loads(response.read()) == {"status": "ok"}


def test_the_tokenizer_is_served_as_files(service, tmp_path):
    """A client elsewhere can load the tokenizer from what the service sends."""
    from transformers import AutoTokenizer

    request = urllib.request.Request(f"{service.url}/local/v1/tokenizer?model=tiny", headers={"X-API-Key": "tml-test"})
    with urllib.request.urlopen(request, timeout=20) as response:
        files = json.loads(response.read())["files"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "x = 1\n\n  <|im_start|>é<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
