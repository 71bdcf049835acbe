"""A Tinker service that trains nothing: the calls that the cookbook's training loop makes, answered at once.

Its model writes as many notes as its task's prompt asks for ("Write 3."), in one message, and then says done. A reward
is so the same whichever process plays the task.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tinker

from stand_in.model import CharacterTokenizer, call, sampled


def said(prompt: str) -> str:
    """What the model says next in a conversation."""
    wanted = int(re.search(r"Write (\d+)\.", prompt).group(1))
    return "done" if "<tool>" in prompt or not wanted else "".join(call("note", text=str(i)) for i in range(wanted))


@dataclass(frozen=True)
class SamplingClient:
    """Samples from the model; it is pickled, as the real one is, to play in a worker."""

    path: str

    async def sample_async(self, *, prompt: tinker.ModelInput, num_samples: int, sampling_params: Any) -> Any:
        tokens = sampled(said(CharacterTokenizer().decode(prompt.to_ints())))
        sequence = SimpleNamespace(tokens=tokens.tokens, logprobs=tokens.maybe_logprobs, stop_reason="stop")
        return SimpleNamespace(sequences=[sequence])


@dataclass(frozen=True)
class Future:
    result: Any

    async def result_async(self) -> Any:
        return self.result


class TrainingClient:
    async def forward_backward_async(self, data: list[tinker.Datum], **_: Any) -> Future:
        outputs = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in data]
        return Future(SimpleNamespace(loss_fn_outputs=outputs, metrics={}))

    async def optim_step_async(self, params: Any) -> Future:
        return Future(SimpleNamespace(metrics={}))

    async def save_state_async(self, name: str, **_: Any) -> Future:
        return Future(SimpleNamespace(path=f"tinker://run/weights/{name}"))

    async def save_weights_for_sampler_async(self, name: str, **_: Any) -> Future:
        return Future(SimpleNamespace(path=f"tinker://run/sampler_weights/{name}"))

    async def save_weights_and_get_sampling_client_async(self, **_: Any) -> SamplingClient:
        return SamplingClient("tinker://run/sampler_weights/now")

    def create_sampling_client(self, path: str) -> SamplingClient:
        return SamplingClient(path)


class RestClient:
    async def get_training_run_by_tinker_path_async(self, path: str) -> Any:
        return SimpleNamespace(user_metadata={})


class ServiceClient:
    def __init__(self, **_: Any) -> None:
        pass

    async def create_lora_training_client_async(self, *_: Any, **__: Any) -> TrainingClient:
        return TrainingClient()

    async def create_training_client_from_state_with_optimizer_async(self, *_: Any, **__: Any) -> TrainingClient:
        return TrainingClient()

    def create_rest_client(self) -> Any:
        return RestClient()
