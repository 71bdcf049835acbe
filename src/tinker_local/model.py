"""The base model in memory and the LoRA adapters on it.

One adapter is active at a time; the base model's own weights never change. Hidden states are computed for flat rows of
tokens under a layout (see `attention`), and the output head only for the hidden states it is given.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from tinker_local import attention
from tinker_local.attention import Layout, RowLayout, UnsupportedAttentionError
from tinker_local.errors import InvalidRequestError, StartupError
from tinker_local.linear import pack_linears
from tinker_local.operations import LoraSpec
from tinker_local.packing import Ints, pack
from tinker_local.weights import BaseModel

# Tinker's adapters scale by alpha / rank with this alpha at every rank, so that the best learning rate does not
# depend on the rank (the LoRA primer of its documentation).
LORA_ALPHA = 32
_ACTIVATION_BYTES = 256 << 20  # of a row's pass; what is above is computed again in the backward pass
_PROBE = "The service computes this sentence in two ways, which must agree before it serves the model."
_PREFIX = "base_model.model."  # what PEFT's files put before a module's path

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Targets:
    """The linear layers of the base model, by the part of it that LoraSpec can switch on."""

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    unembedding: tuple[str, ...]

    def of(self, spec: LoraSpec) -> list[str]:
        chosen = (
            (self.attention if spec.train_attn else ())
            + (self.mlp if spec.train_mlp else ())
            + (self.unembedding if spec.train_unembed else ())
        )
        if not chosen:
            raise InvalidRequestError("nothing to train: set train_attn, train_mlp or train_unembed")
        return sorted(chosen)


class LanguageModel:
    """A causal language model with named LoRA adapters. Not thread-safe: one thread owns it."""

    def __init__(self, base: BaseModel) -> None:
        attention.register()
        self.name = base.names[0]
        self.stop_ids = base.stop_ids
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._network: Any = base.network.to(self.device)
        self._network.requires_grad_(requires_grad=False)
        pack_linears(self._network)
        config = self._network.config.get_text_config()
        self.context_length = int(config.max_position_embeddings)
        self.vocabulary = int(self._network.get_input_embeddings().weight.shape[0])
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.token_bytes = 2 * int(config.num_hidden_layers) * heads * width * 4  # of one token's keys and values
        # Of one token's pass with gradients; measured on the default model, 14 and 5 tensors of either width a layer.
        inner = int(getattr(config, "intermediate_size", 0) or 4 * config.hidden_size)
        self._activation_bytes = int(config.num_hidden_layers) * 4 * (14 * int(config.hidden_size) + 5 * inner)
        self._head_path = _find_head(self._network)
        self._targets = self._find_targets()
        self._layers: list[tuple[str, Any]] = []
        self._keys: dict[str, str] = {}  # adapter name -> its key in PEFT, which does not take every name
        self._count = 0
        self._active: str | None = None
        self._check_attention(np.array(base.tokenizer.encode(_PROBE), dtype=np.int64))

    @property
    def architecture(self) -> str:
        """The class of the base model."""
        return type(self._network).__name__

    def on_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return the array as a tensor where the model computes."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def hidden(self, tokens: Ints, positions: Ints, layout: Layout) -> torch.Tensor:
        """Return the last hidden states [T, H] of a flat row under the active adapter."""
        output = self._network.base_model(
            input_ids=self.on_device(tokens)[None],
            position_ids=self.on_device(positions)[None],
            use_cache=False,
            layout=layout,
        )
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of hidden states [N, H] under the active adapter."""
        logits: torch.Tensor = self._network.get_submodule(self._head_path)(hidden)
        return logits

    @contextmanager
    def keeping_activations(self, *, tokens: int) -> Iterator[None]:
        """Keep the activations of as many layers as fit in memory for a row of that many tokens.

        The others compute theirs again in the backward pass.
        """
        kept = min(1.0, _ACTIVATION_BYTES / (tokens * self._activation_bytes))
        layers = [layer for layer in self._network.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if kept == 1.0 or not layers:
            yield
            return
        self._network.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers[: round(kept * len(layers))]:
            layer.gradient_checkpointing = False
        self._network.train()  # transformers computes again only in this mode; nothing here has dropout
        try:
            yield
        finally:
            self._network.gradient_checkpointing_disable()
            self._network.eval()

    def add_adapter(self, name: str, spec: LoraSpec, *, trainable: bool) -> None:
        """Add a fresh adapter: A uniform in ±1/sqrt(inputs) from the spec's seed, B zero.

        Raises InvalidRequestError if the spec switches on nothing.
        """
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=LORA_ALPHA,
            lora_dropout=0.0,
            bias="none",
            target_modules=self._targets.of(spec),
            inference_mode=not trainable,
        )
        self._count += 1
        self._keys[name] = f"adapter{self._count}"
        with torch.random.fork_rng():
            if spec.seed is not None:
                torch.manual_seed(spec.seed)
            with warnings.catch_warnings():
                # PEFT warns of a second adapter and of one on a tied output head; both are what is wanted here.
                warnings.simplefilter("ignore", UserWarning)
                inject_adapter_in_model(config, self._network, adapter_name=self._keys[name])
        self._layers = [(path, layer) for path, layer in self._network.named_modules() if isinstance(layer, LoraLayer)]
        self._network.eval()
        for _, parameter in self.parameters(name):
            parameter.requires_grad = trainable
        self._select(None)

    def remove_adapter(self, name: str) -> None:
        """Forget the adapter; the active one stays active unless it is the one removed."""
        key = self._keys.pop(name)
        for _, layer in self._layers:
            if key in layer.lora_A:
                del layer.lora_A[key], layer.lora_B[key]
                for table in (layer.r, layer.lora_alpha, layer.scaling, layer.lora_dropout):
                    if key in table:
                        del table[key]
        self._network.peft_config.pop(key, None)
        self._select(None)

    def activate(self, name: str | None) -> None:
        """Compute with this adapter from now on; None stands for the base model alone."""
        if name != self._active:
            self._select(name)

    def _select(self, name: str | None) -> None:
        key = None if name is None else self._keys[name]
        for _, layer in self._layers:
            layer._active_adapter = [key] if key in layer.lora_A else []
        self._active = name

    def parameters(self, name: str) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the adapter's parameters under the names that PEFT's files give them."""
        key, found = self._keys[name], []
        for path, layer in self._layers:
            if key in layer.lora_A:
                found.append((f"{_PREFIX}{path}.lora_A.weight", layer.lora_A[key].weight))
                found.append((f"{_PREFIX}{path}.lora_B.weight", layer.lora_B[key].weight))
        return found

    def state(self, name: str) -> State:
        """Return a copy of the adapter's weights."""
        return {key: parameter.detach().clone() for key, parameter in self.parameters(name)}

    def load_state(self, name: str, state: State) -> None:
        """Overwrite the adapter's weights.

        Raises InvalidRequestError if the state is of an adapter of another shape.
        """
        parameters = dict(self.parameters(name))
        if {key: value.shape for key, value in parameters.items()} != {key: v.shape for key, v in state.items()}:
            raise InvalidRequestError("the checkpoint's adapter has other layers or another rank than this model's")
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter.copy_(state[key])

    def adapter_config(self, spec: LoraSpec) -> dict[str, Any]:
        """Return the adapter_config.json with which plain PEFT loads an adapter of this spec."""
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=LORA_ALPHA,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            target_modules=self._targets.of(spec),
            base_model_name_or_path=self.name,
            inference_mode=True,
        )
        return {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}  # type: ignore[no-untyped-call]

    def _find_targets(self) -> _Targets:
        attention_paths: list[str] = []
        mlp_paths: list[str] = []
        for path, module in self._network.named_modules():
            if isinstance(module, torch.nn.Linear) and path != self._head_path:
                parts = re.split(r"[._]", path)
                is_attention = bool({"attn", "attention"} & set(parts))
                (attention_paths if is_attention else mlp_paths).append(path)
        return _Targets(tuple(attention_paths), tuple(mlp_paths), (self._head_path,))

    @torch.inference_mode()
    def _check_attention(self, tokens: Ints) -> None:
        """Compare a packed row's logits with the model's own, so that no unsupported model gives wrong numbers."""
        original = self._network.config._attn_implementation
        expected = self._network(input_ids=self.on_device(tokens)[None], use_cache=False).logits[0]
        self._network.set_attn_implementation(attention.NAME)
        (row,) = pack([tokens[: len(tokens) // 2], tokens], budget=len(tokens))
        try:
            found = self.logits(self.hidden(row.tokens, row.positions, RowLayout(row, self.device)))[row.paths[-1]]
        except (UnsupportedAttentionError, TypeError, AttributeError) as error:
            raise StartupError(f"model {self.name!r} can't be served: {error}") from error
        if not torch.allclose(found, expected, atol=1e-2, rtol=1e-3):
            raise StartupError(
                f"model {self.name!r} can't be served: its {original} attention or its output head does something "
                "that this service does not compute"
            )


def _find_head(network: Any) -> str:
    head = network.get_output_embeddings()
    for path, module in network.named_modules():
        if module is head:
            return str(path)
    raise StartupError(f"model {type(network).__name__} has no output head: it is not a causal language model")
