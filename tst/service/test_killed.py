"""A run whose service is killed, by the real SDK: it ends, though the SDK would wait on."""

import os
import subprocess
import sys

import pytest
import tinker

from agentenv_tinker.answering import answering
from agentenv_tinker.errors import TrainingError

TEXT = [72, 101, 108, 108, 111]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A service of the test's own, and its address."""
    arguments = ("--model", "tiny", "--port", "0", "--until-eof", "--data", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-m", "tinker_local", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as process:
        url = process.stdout.readline().split()[-1]
        monkeypatch.setenv("TINKER_BASE_URL", url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-test")
        yield process, url
        process.kill()


async def watched(url, work):
    async with answering(url, "the service", tries=2, every=0.5):
        await work


async def test_a_training_request_and_the_end_of_the_session_are_not_waited_for(command, datum):
    """As in the cookbook's `rl.train`, which since 0.6 ends the session before it lets go of the event loop."""
    process, url = command

    async def steps():
        with tinker.ServiceClient() as client:
            training = await client.create_lora_training_client_async("tiny", rank=2, seed=1)
            await (await training.forward_backward_async([datum(TEXT)], "cross_entropy"))
            process.kill()
            await (await training.forward_backward_async([datum(TEXT)], "cross_entropy"))

    with pytest.raises(TrainingError, match=r"^the service has not answered for 1 s$"):
        await watched(url, steps())


async def test_a_session_that_is_opened_is_not_waited_for(command):
    """The SDK does that on the caller's event loop."""
    process, url = command
    process.kill()

    with pytest.raises(TrainingError, match="has not answered"):
        await watched(url, tinker.ServiceClient().create_sampling_client_async(base_model="tiny"))
