"""The command: how it starts, stops, refuses to start, and goes on after it was killed."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
from tinker import types

TEXT = [72, 101, 108, 108, 111]


@contextmanager
def command(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command and give its process and the URL it says it serves at; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tinker_local", "--model", "tiny", "--port", "0", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("tinker_local: serving tiny at http://127.0.0.1:"), process.stderr.read()
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


def free_port() -> str:
    """Return a port that a service can be started on again under its old address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return str(taken.getsockname()[1])


def refusal(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run the command to its end and give its exit code and what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "tinker_local", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(tmp_path, number, ready):
    """SIGTERM and SIGINT end it with exit code 0, while a client waits for an answer too."""
    with command("--data", str(tmp_path)) as (process, url):
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        sampler = ready(client.create_sampling_client(base_model="tiny"))
        sampler.sample(types.ModelInput.from_ints(TEXT), 64, types.SamplingParams(max_tokens=4000, stop=[]))
        process.send_signal(number)
        assert process.wait(timeout=15) == 0


def test_the_end_of_its_input_stops_it(tmp_path):
    """With --until-eof it lives as long as whoever holds its standard input."""
    with command("--data", str(tmp_path), "--until-eof") as (process, _):
        process.stdin.close()
        assert process.wait(timeout=15) == 0
        process.stdin = None


def test_a_killed_service_goes_on_from_its_checkpoints(tmp_path, ready):
    """After a kill in the middle of training, runs, checkpoints and samplers are there, and a resumed run goes on."""
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(TEXT[:-1]),
            loss_fn_inputs={"target_tokens": TEXT[1:], "weights": [1.0] * 4},
        )
    ]
    step, place = types.AdamParams(learning_rate=1e-2), ("--data", str(tmp_path), "--port", free_port())
    with command(*place) as (process, url):
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        run = ready(client.create_lora_training_client("tiny", rank=2, seed=1))
        run.forward_backward(data, "cross_entropy").result(timeout=60)
        run.optim_step(step).result(timeout=60)
        state = run.save_state("kept").result(timeout=60).path
        weights = run.save_weights_for_sampler("kept").result(timeout=60).path
        expected = run.forward_backward(data, "cross_entropy").result(timeout=60).metrics
        sampler = ready(client.create_sampling_client(model_path=weights))
        before = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result(timeout=60)
        run.forward_backward(data * 500, "cross_entropy")
        process.kill()
    (tmp_path / "drafts" / "half-written").mkdir()
    with command(*place):
        listed = client.create_rest_client().list_checkpoints(run.model_id).result(timeout=30).checkpoints
        resumed = ready(client.create_training_client_from_state_with_optimizer(state))
        assert [entry.tinker_path for entry in listed] == [state, weights]
        assert resumed.forward(data, "cross_entropy").result(timeout=60).metrics == pytest.approx(expected, abs=1e-6)
        assert sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result(timeout=60) == pytest.approx(
            before, abs=1e-5
        )
        assert list((tmp_path / "drafts").glob("half*")) == []


def test_a_run_that_was_lost_names_its_last_checkpoint(tmp_path, ready):
    """A client that goes on with a run of before the restart is told where to resume."""
    place = ("--data", str(tmp_path), "--port", free_port())
    with command(*place) as (_, url):
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        run = ready(client.create_lora_training_client("tiny", rank=2))
        state = run.save_state("kept").result(timeout=60).path
    with command(*place), pytest.raises(tinker.RequestFailedError, match=f"go on from its last checkpoint {state}"):
        run.save_state("more").result(timeout=60)


def test_a_key_of_its_own_is_the_only_one_it_takes(tmp_path):
    """With TINKER_LOCAL_API_KEY set, another key is refused."""
    with command("--data", str(tmp_path), TINKER_LOCAL_API_KEY="tml-mine") as (_, url):
        with pytest.raises(tinker.AuthenticationError, match="TINKER_LOCAL_API_KEY"):
            tinker.ServiceClient(base_url=url, api_key="tml-other").holder  # noqa: B018
        assert tinker.ServiceClient(base_url=url, api_key="tml-mine").holder.get_session_id()
        with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=20) as response:
            assert response.status == 200


def test_an_unknown_model_is_one_line_and_exit_code_2(tmp_path):
    """A model folder that is not there is told in one line."""
    code, out, err = refusal("--model", "./nowhere", "--port", "0", "--data", str(tmp_path))
    assert (code, out, err) == (2, "", "tinker_local: model folder './nowhere' does not exist\n")


def test_a_taken_port_is_one_line_and_exit_code_2(tmp_path):
    """A port that another process listens on is told in one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = refusal("--model", "tiny", "--port", str(port), "--data", str(tmp_path))
    expected = f"tinker_local: can't listen on 127.0.0.1:{port}: Address already in use (--port 0 takes a free port)\n"
    assert (code, out, err) == (2, "", expected)


def test_an_unusable_data_folder_is_one_line_and_exit_code_2(tmp_path):
    """A data folder that is a file is told in one line."""
    (tmp_path / "file").write_text("")
    code, out, err = refusal("--model", "tiny", "--port", "0", "--data", str(tmp_path / "file"))
    assert (code, out, err) == (2, "", f"tinker_local: data folder '{tmp_path}/file' can't be used: Not a directory\n")


def test_beyond_loopback_it_wants_a_key(tmp_path):
    """Listening for other machines without a key is refused before anything starts."""
    code, out, err = refusal("--model", "tiny", "--host", "0.0.0.0", "--port", "0", "--data", str(tmp_path))
    expected = "listening on 0.0.0.0 lets other machines in: set TINKER_LOCAL_API_KEY to the key they must give"
    assert (code, out, err) == (2, "", f"tinker_local: {expected}\n")


def test_folder_of_a_model_is_served_under_its_path(tmp_path: Path, ready):
    """A Hugging Face folder is served, and the run can be named by that path."""
    from tinker_local import weights

    base = weights.load("tiny", progress=print)
    folder = tmp_path / "model"
    base.network.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "tinker_local", "--model", str(folder), "--port", "0", "--data", str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = process.stdout.readline().split()[-1]
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        run = ready(client.create_lora_training_client(str(folder), rank=2))
        assert run.get_info().model_data.model_name == str(folder)
    finally:
        process.kill()
        process.communicate()
