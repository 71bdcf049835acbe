"""A run whose service is killed, by the real SDK: it ends, though the SDK would wait on.

Each in a process of its own: what ends it cancels all that the SDK waits for in its process.
"""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
import tinker
from tinker import types

from agentenv_tinker.answering import answering

KEY = "tml-test"


@pytest.fixture
def service(tmp_path):
    """A service of the test's own, and its address."""
    arguments = ("--model", "tiny", "--port", "0", "--until-eof", "--data", str(tmp_path))
    command = [sys.executable, "-m", "tinker_local", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process.pid, process.stdout.readline().split()[-1]
        process.kill()


@pytest.mark.parametrize("what", ["training", "opening"])
def test_what_the_sdk_waits_for_is_dropped_once_the_service_has_not_answered(service, what):
    """A training request and the session's end, as the cookbook's `rl.train` has them since 0.6; and a session that is
    opened, which the SDK waits for on the caller's event loop."""
    pid, url = service
    environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": KEY}
    run = subprocess.run(
        [sys.executable, __file__, what, str(pid), url], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == ("agentenv_tinker.errors.TrainingError: the service has not answered for 1 s")


async def training(pid: int) -> None:
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([72, 101, 108]),
        loss_fn_inputs={"target_tokens": [101, 108, 108], "weights": [1.0] * 3},
    )
    with tinker.ServiceClient() as client:
        model = await client.create_lora_training_client_async("tiny", rank=2, seed=1)
        await (await model.forward_backward_async([datum], "cross_entropy"))
        os.kill(pid, signal.SIGKILL)
        await (await model.forward_backward_async([datum], "cross_entropy"))


async def opening(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    await tinker.ServiceClient().create_sampling_client_async(base_model="tiny")


async def main(what: str, pid: str, url: str) -> None:
    async with answering(url, "the service", tries=2, every=0.5):
        await {"training": training, "opening": opening}[what](int(pid))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
