"""A service with the tiny model for the whole run, and the SDK's clients of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tinker_local import server
from tinker_local.start import open_service

KEY = "tml-test"


@dataclass(frozen=True)
class Running:
    """A service that answers at `url` and keeps its data in `data`."""

    url: str
    data: Path


def pytest_configure(config: pytest.Config) -> None:
    """Let pass what the SDK warns of: names that the cookbook still calls, and sockets that it never closes."""
    for warning in ("FutureWarning", "ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{warning}")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("tinker-local")
    with server.running(open_service("tiny", data, key=None, progress=lambda line: None)) as url:
        yield Running(url, data)


@pytest.fixture(scope="session")
def client(service: Running) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=service.url, api_key=KEY)
    yield client
    client.close("success").result(timeout=30)


@pytest.fixture(scope="session")
def rest(client: tinker.ServiceClient):
    return client.create_rest_client()


@pytest.fixture(scope="session")
def ready() -> Callable[[Any], Any]:
    """Wait for a client that is being made: newer SDKs answer with its future, older ones with the client."""
    return lambda made: made.result(timeout=60) if hasattr(made, "result") else made


@pytest.fixture
def training(client: tinker.ServiceClient, ready: Callable[[Any], Any]) -> tinker.TrainingClient:
    return ready(client.create_lora_training_client("tiny", rank=4, seed=7))


@pytest.fixture
def datum() -> Callable[..., types.Datum]:
    """Make a datum that predicts each next token; inputs are per predicted token, weights 1 by default."""

    def make(tokens: list[int], **inputs: object) -> types.Datum:
        fields = inputs or {"weights": [1.0] * (len(tokens) - 1)}
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **fields}
        )

    return make


@pytest.fixture
def sample() -> Callable[..., types.SampleResponse]:
    """Sample from a client, up to 8 tokens each unless told otherwise."""

    def draw(
        client: tinker.SamplingClient, prompt: list[int], count: int = 1, **params: object
    ) -> types.SampleResponse:
        chosen = types.SamplingParams(**{"max_tokens": 8, **params})
        return client.sample(types.ModelInput.from_ints(prompt), count, chosen).result(timeout=60)

    return draw
