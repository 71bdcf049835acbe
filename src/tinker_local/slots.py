"""The keys and values of sequences: of those being decoded, and of those seen lately, to start others from."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from tinker_local.packing import Ints, common_prefix


class Slots:
    """Keys and values of up to B sequences side by side: `store` is [2, layers, S, K, capacity, D], slots 0..B-1 used.

    Sequences leave by moving the last one into the hole, so that the used slots stay together.
    """

    def __init__(self) -> None:
        self.store = torch.empty(0)
        self.lengths: list[int] = []

    def bytes_with(self, *, sequences: int, length: int, token_bytes: int) -> int:
        """Return the memory that the store needs for that many sequences of that length, at least what it has."""
        return max(sequences, len(self.lengths)) * max([length, *self.lengths]) * token_bytes

    def add(self, keys_values: torch.Tensor) -> None:
        """Take in a sequence of n tokens, [2, layers, K, n, D]."""
        length = keys_values.shape[3]
        self._reserve(len(self.lengths) + 1, length + 1, keys_values)
        self.store[:, :, len(self.lengths), :, :length] = keys_values
        self.lengths.append(length)

    def grow(self) -> None:
        """Make room for one more token in every slot."""
        self._reserve(len(self.lengths), max(self.lengths) + 1, self.store[:, :, 0])

    def remove(self, index: int) -> None:
        """Let a sequence go; the last sequence takes its index."""
        last = len(self.lengths) - 1
        if index != last:
            length = self.lengths[last]
            self.store[:, :, index, :, :length] = self.store[:, :, last, :, :length]
            self.lengths[index] = self.lengths[last]
        self.lengths.pop()
        if not self.lengths:
            self.store = torch.empty(0)

    def read(self, index: int) -> torch.Tensor:
        """Return a copy of a sequence's keys and values, [2, layers, K, n, D]."""
        return self.store[:, :, index, :, : self.lengths[index]].clone()

    def _reserve(self, sequences: int, length: int, like: torch.Tensor) -> None:
        have_sequences, have_length = (self.store.shape[2], self.store.shape[4]) if self.store.dim() == 6 else (0, 0)
        if sequences <= have_sequences and length <= have_length:
            return
        sequences = max(have_sequences, 1 << (sequences - 1).bit_length())
        length = max(have_length, -(-length // 64) * 64)
        halves, layers, heads, _, width = like.shape
        grown = torch.zeros(halves, layers, sequences, heads, length, width, device=like.device)
        if self.lengths:
            used = max(self.lengths)
            grown[:, :, : len(self.lengths), :, :used] = self.store[:, :, : len(self.lengths), :, :used]
        self.store = grown


@dataclass(frozen=True)
class _Seen:
    tokens: Ints
    keys_values: torch.Tensor  # [2, layers, K, len(tokens), D]


class PrefixCache:
    """Keys and values of token sequences seen lately, by the weights that computed them; the oldest go first."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[int, tuple[str, _Seen]] = OrderedDict()
        self._next = 0

    def find(self, weights: str, tokens: Ints) -> torch.Tensor | None:
        """Return the keys and values of the longest known beginning of `tokens`, leaving a token to compute."""
        best, best_length = None, 0
        for key, (owner, seen) in self._entries.items():
            if owner == weights:
                length = min(common_prefix(seen.tokens, tokens), len(tokens) - 1)
                if length > best_length:
                    best, best_length = key, length
        if best is None:
            return None
        self._entries.move_to_end(best)
        return self._entries[best][1].keys_values[:, :, :, :best_length]

    def add(self, weights: str, tokens: Ints, keys_values: torch.Tensor) -> None:
        """Remember a sequence, in place of those that it extends."""
        if _size(keys_values) > self._max_bytes:
            return
        for key, (owner, seen) in list(self._entries.items()):
            if owner == weights and common_prefix(seen.tokens, tokens) == len(seen.tokens):
                self._drop(key)
        self._entries[self._next] = (weights, _Seen(np.array(tokens), keys_values))
        self._next += 1
        self._bytes += _size(keys_values)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def forget(self, weights: str) -> None:
        """Drop everything that those weights computed."""
        for key in [key for key, (owner, _) in self._entries.items() if owner == weights]:
            self._drop(key)

    def _drop(self, key: int) -> None:
        _, seen = self._entries.pop(key)
        self._bytes -= _size(seen.keys_values)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
