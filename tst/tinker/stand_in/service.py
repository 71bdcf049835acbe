"""A Tinker service that trains nothing: the calls that the cookbook's training loop makes, answered at once.

Its model writes as many notes as its task's prompt asks for ("Write 3."), in one message, and then says done. A reward
is so the same whichever process plays the task.
"""

import re
from collections.abc import Generator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tinker

from stand_in.model import MODEL, CharacterTokenizer, call, sampled


def said(prompt: str) -> str:
    """What the model says next in a conversation."""
    wanted = int(re.search(r"Write (\d+)\.", prompt).group(1))
    return "done" if "<tool>" in prompt or not wanted else "".join(call("note", text=str(i)) for i in range(wanted))


@dataclass(frozen=True)
class Future:
    """An answer that is there: awaited, asked for, or asked for later, as the cookbook's versions do."""

    answer: Any

    def result(self) -> Any:
        return self.answer

    async def result_async(self) -> Any:
        return self.answer

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result_async().__await__()


@dataclass(frozen=True)
class SamplingClient:
    """Samples from the model; it is pickled, as the real one is, to play in a worker."""

    path: str

    def result(self) -> "SamplingClient":
        return self

    def sample(self, *, prompt: tinker.ModelInput, **_: Any) -> Future:
        tokens = sampled(said(CharacterTokenizer().decode(prompt.to_ints())))
        sequence = SimpleNamespace(
            tokens=tokens.tokens, logprobs=tokens.maybe_logprobs, stop_reason="stop", sequence_id="0"
        )
        return Future(SimpleNamespace(sequences=[sequence], prompt_cache_hit_tokens=0))

    async def sample_async(self, **asked: Any) -> Any:
        return self.sample(**asked).answer

    async def get_base_model_async(self) -> str:
        return MODEL


class TrainingClient:
    def forward_backward(self, data: list[tinker.Datum], **_: Any) -> Future:
        outputs = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in data]
        return Future(SimpleNamespace(loss_fn_outputs=outputs, metrics={}))

    def optim_step(self, params: Any) -> Future:
        return Future(SimpleNamespace(metrics={}))

    def save_state(self, name: str, **_: Any) -> Future:
        return Future(SimpleNamespace(path=f"tinker://run/weights/{name}"))

    def save_weights_for_sampler(self, name: str, **_: Any) -> Future:
        return Future(SimpleNamespace(path=f"tinker://run/sampler_weights/{name}"))

    def save_weights_and_get_sampling_client(self, **_: Any) -> Future:
        return Future(SamplingClient("tinker://run/sampler_weights/now"))

    def create_sampling_client(self, path: str, **_: Any) -> SamplingClient:
        return SamplingClient(path)

    async def forward_backward_async(self, data: list[tinker.Datum], **more: Any) -> Future:
        return self.forward_backward(data, **more)

    async def optim_step_async(self, params: Any) -> Future:
        return self.optim_step(params)

    async def save_state_async(self, name: str, **more: Any) -> Future:
        return self.save_state(name, **more)

    async def save_weights_for_sampler_async(self, name: str, **more: Any) -> Future:
        return self.save_weights_for_sampler(name, **more)

    async def save_weights_and_get_sampling_client_async(self, **more: Any) -> SamplingClient:
        return SamplingClient("tinker://run/sampler_weights/now")


class RestClient:
    def __init__(self, **_: Any) -> None:
        pass

    def get_training_run_by_tinker_path(self, path: str) -> Future:
        return Future(SimpleNamespace(user_metadata={}))

    async def get_training_run_by_tinker_path_async(self, path: str) -> Any:
        return SimpleNamespace(user_metadata={})


class ServiceClient:
    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> "ServiceClient":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_server_capabilities(self) -> Any:
        return SimpleNamespace(supported_models=[SimpleNamespace(model_name=MODEL)])

    def create_rest_client(self) -> RestClient:
        return RestClient()

    async def create_sampling_client_async(
        self, *, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        return SamplingClient(model_path or f"base:{base_model}")

    async def create_lora_training_client(self, *_: Any, **__: Any) -> TrainingClient:
        return TrainingClient()

    create_lora_training_client_async = create_lora_training_client
    create_training_client_from_state_with_optimizer = create_lora_training_client
    create_training_client_from_state_with_optimizer_async = create_lora_training_client
