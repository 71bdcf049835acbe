"""A service with the tiny model for the whole run, and the SDK's clients of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let pass what the SDK warns of: names that the cookbook still calls, and sockets that it never closes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


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


@pytest.fixture
def training(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client("tiny", rank=4, seed=7).result(timeout=60)


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
