"""The attention that packed rows and batched decoding need, as an attention function of transformers.

A forward pass hands its layout to every attention layer as a keyword argument; the layout decides what each token
attends to. Models that give attention a window, a soft cap or sinks are refused, never computed without them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from tinker_local.packing import Row

NAME = "tinker_local"
Past = Sequence[torch.Tensor]
"""The keys and values of the tokens before others, as parts [2, layers, K, .., D] in their order; empty for none."""


class UnsupportedAttentionError(Exception):
    """The model's attention has a feature that the layouts here do not compute."""


class Layout(Protocol):
    """Decides what each token of a flat row attends to."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attend with query [H, T, D] over key and value [K, T, D]; return [T, H, D]."""
        ...


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as the layout says: the interface of a transformers attention function."""
    present = sorted(name for name in ("sliding_window", "softcap", "s_aux") if features.get(name) is not None)
    if present:
        raise UnsupportedAttentionError(f"its attention uses {', '.join(present)}, which this service does not compute")
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return layout.attend(layer, query[0], key[0], value[0], scale).unsqueeze(0), None


def register() -> None:
    """Make the attention function known to transformers under NAME."""
    AttentionInterface.register(NAME, attention)


class RowLayout:
    """A packed row: each segment attends to its context and causally to itself.

    With `pasts`, one a segment, each segment attends to its past as well, what came before it. With `capture`, the
    keys and values computed for the row are kept in `captured`, one [2, K, T, D] per layer.
    """

    def __init__(
        self, row: Row, device: torch.device, *, pasts: Sequence[Past] | None = None, capture: bool = False
    ) -> None:
        self._spans = [(segment.start, segment.stop) for segment in row.segments]
        self._paths = [
            torch.from_numpy(np.concatenate([segment.context, np.arange(segment.start, segment.stop)])).to(device)
            if len(segment.context)
            else None
            for segment in row.segments
        ]
        self._pasts = pasts if pasts is not None else [()] * len(self._spans)
        self._capture = capture
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self.captured: list[torch.Tensor] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See Layout.attend."""
        if self._capture:
            self.captured.append(torch.stack([key, value]))
        outputs = []
        for (start, stop), path, past in zip(self._spans, self._paths, self._pasts, strict=True):
            keys = key[:, start:stop] if path is None else key.index_select(1, path)
            values = value[:, start:stop] if path is None else value.index_select(1, path)
            if past:
                keys = torch.cat([*(part[0, layer] for part in past), keys], dim=1)
                values = torch.cat([*(part[1, layer] for part in past), values], dim=1)
            outputs.append(self._attend_segment(query[:, start:stop], keys, values, scaling))
        return torch.cat(outputs, dim=1).transpose(0, 1)

    def _attend_segment(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        groups = query.shape[0] // keys.shape[0]
        if groups > 1:
            keys, values = keys.repeat_interleave(groups, dim=0), values.repeat_interleave(groups, dim=0)
        mask = self._mask(query.shape[1], keys.shape[1], query.device)
        attended: torch.Tensor = functional.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=scaling
        )
        return attended[0]

    def _mask(self, queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
        """Return which keys each of the last `queries` tokens sees; None where that is the plain causal triangle."""
        if queries == keys:
            return None
        if (queries, keys) not in self._masks:
            full = torch.ones(queries, keys, dtype=torch.bool, device=device)
            self._masks[queries, keys] = full.tril(diagonal=keys - queries)
        return self._masks[queries, keys]


class DecodeLayout:
    """One new token for each of B sequences, whose earlier keys and values lie in the slots 0..B-1 of `slots`.

    `slots` has shape [2, layers, S, K, capacity, D]; `lengths` [B], on the same device, counts the tokens each slot
    holds already. The new token's keys and values are written behind them.
    """

    def __init__(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        self._slots = slots
        self._lengths = lengths
        self._rows = torch.arange(len(lengths), device=lengths.device)
        self._longest = int(lengths.max()) + 1
        beyond = torch.arange(self._longest, device=lengths.device)[None, :] > lengths[:, None]
        bias = torch.zeros(beyond.shape, device=lengths.device).masked_fill_(beyond, float("-inf"))
        self._bias = bias[:, None, None, :]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See Layout.attend."""
        keys, values = self._slots[0, layer], self._slots[1, layer]
        keys[self._rows, :, self._lengths] = key.transpose(0, 1)
        values[self._rows, :, self._lengths] = value.transpose(0, 1)
        heads, batch, width = query.shape
        kv_heads, capacity = keys.shape[1], keys.shape[2]
        groups = heads // kv_heads
        # Queries of the heads that share one key head form one matrix, so no key is copied per query head.
        queries = query.transpose(0, 1).reshape(batch * kv_heads, groups, width) * scaling
        flat_keys = keys.view(-1, capacity, width)[: batch * kv_heads, : self._longest]
        flat_values = values.view(-1, capacity, width)[: batch * kv_heads, : self._longest]
        scores = torch.bmm(queries, flat_keys.transpose(1, 2)).view(batch, kv_heads, groups, -1)
        weights = torch.softmax(scores + self._bias, dim=-1).view(batch * kv_heads, groups, -1)
        return torch.bmm(weights, flat_values).view(batch, heads, width)
