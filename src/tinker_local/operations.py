"""What the service can be asked to compute and what it answers, as plain data between HTTP and the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tinker_local.errors import ServiceError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SparseLayout:
    """Which cells of a matrix a sparse CSR tensor lists: compressed row pointers and column indices."""

    rows: Ints
    columns: Ints

    def cells(self) -> tuple[Ints, Ints]:
        """Return the row and the column of each listed cell."""
        return np.repeat(np.arange(len(self.rows) - 1), np.diff(self.rows)), self.columns


@dataclass(frozen=True)
class LoraSpec:
    """An adapter to train."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class Datum:
    """One training sequence of T tokens; every loss input has T rows."""

    tokens: Ints
    inputs: Mapping[str, Array]


@dataclass(frozen=True)
class CreateModel:
    """Start a training run with a fresh adapter."""

    model_id: str
    session_id: str
    base_model: str
    lora: LoraSpec
    user_metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UnloadModel:
    """Forget a training run's weights in memory; its checkpoints stay."""

    model_id: str


@dataclass(frozen=True)
class ForwardBackward:
    """Compute a loss and, unless `forward_only`, add its gradient to the run's."""

    model_id: str
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True)
class OptimStep:
    """Take one AdamW step with the gradients gathered since the last one."""

    model_id: str
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float  # 0 does not clip


@dataclass(frozen=True)
class SaveState:
    """Write a run's adapter and optimizer state as a training checkpoint."""

    model_id: str
    name: str
    overwrite: bool
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True)
class LoadState:
    """Put a training checkpoint into a run."""

    model_id: str
    path: str
    with_optimizer: bool
    create: CreateModel | None = None  # the run to start first, where the load is its first request


@dataclass(frozen=True)
class SaveForSampler:
    """Write a run's adapter for sampling: as a named checkpoint, or as a sampler of its own."""

    model_id: str
    name: str | None
    sampler_id: str | None
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True)
class SaveExternal:
    """Write a run's adapter for other programs, encrypted to age recipients if there are any."""

    model_id: str
    name: str
    recipients: tuple[str, ...] = ()
    ttl_seconds: int | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens."""

    max_tokens: int | None = None  # None: up to the context length
    seed: int | None = None
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = -1  # below 1: no limit
    top_p: float = 1.0
    stop_tokens: frozenset[int] | None = None  # None: the model's own end tokens
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """Sample continuations of one prompt."""

    sampler_id: str
    prompt: Ints
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt: int = 0
    topk_sample: int = 0
    target_tokens: Ints | None = None  # [len(prompt) - 1, K], -1 where nothing is asked
    target_layout: SparseLayout | None = None  # where target_tokens came as a sparse tensor
    alternatives: int = 0


Training = (
    CreateModel | UnloadModel | ForwardBackward | OptimStep | SaveState | LoadState | SaveForSampler | SaveExternal
)


@dataclass(frozen=True)
class ModelCreated:
    """The answer to CreateModel."""

    model_id: str


@dataclass(frozen=True)
class ModelUnloaded:
    """The answer to UnloadModel."""

    model_id: str


@dataclass(frozen=True)
class TrainingOutput:
    """The answer to ForwardBackward: per-datum arrays and summed metrics."""

    outputs: tuple[Mapping[str, Array], ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepTaken:
    """The answer to OptimStep."""

    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Saved:
    """The answer to SaveState, SaveForSampler and SaveExternal: a checkpoint's path, or the sampler's id."""

    kind: Literal["save_weights", "save_weights_for_sampler", "save_weights_external"]
    path: str | None = None
    sampler_id: str | None = None


@dataclass(frozen=True)
class Loaded:
    """The answer to LoadState."""

    model_id: str
    path: str


@dataclass(frozen=True)
class TopLogprobs:
    """The K likeliest tokens at each of N positions, [N, K]; a position not computed holds 0 and -99999."""

    token_ids: Array
    logprobs: Floats


@dataclass(frozen=True)
class Sequence:
    """One sampled continuation."""

    tokens: Ints
    logprobs: Floats
    stopped: bool  # False where it ran out of tokens
    top: TopLogprobs | None = None


@dataclass(frozen=True)
class SampleOutput:
    """The answer to Sample; what describes the prompt is None where it was not asked for."""

    sequences: tuple[Sequence, ...]
    cached_tokens: int = 0
    prompt_logprobs: Floats | None = None  # [len(prompt)], NaN where not computed
    prompt_top: TopLogprobs | None = None
    target_logprobs: Floats | None = None  # the shape of Sample.target_tokens, 0 where nothing was asked
    target_layout: SparseLayout | None = None  # Sample.target_layout
    alternatives: tuple[Ints, Floats] | None = None  # [len(prompt) - 1, K] token ids and logprobs


Result = ModelCreated | ModelUnloaded | TrainingOutput | StepTaken | Saved | Loaded | SampleOutput


@dataclass(frozen=True)
class Finished:
    """What became of a sample request."""

    ticket: str
    outcome: SampleOutput | ServiceError
