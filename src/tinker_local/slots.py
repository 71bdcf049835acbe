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
    """A sequence: the keys and values of what follows the beginning that it has in common with its parent."""

    owner: str
    tokens: Ints
    parent: int | None
    start: int
    tail: torch.Tensor  # [2, layers, K, len(tokens) - start, D]


class PrefixCache:
    """Keys and values of token sequences seen lately, by the weights that computed them; the oldest go first.

    What sequences have in common is kept once, so that the turns of many conversations fit, which begin alike.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[int, _Seen] = OrderedDict()  # by use, each one before its parent: leaves go first
        self._next = 0

    def find(self, weights: str, tokens: Ints) -> list[torch.Tensor]:
        """Return the longest known beginning of `tokens`, leaving a token to compute: its keys and values, in parts."""
        key, length = self._longest(weights, tokens[:-1])
        self._touch(key)
        parts = []
        while key is not None:
            seen = self._entries[key]
            if length > seen.start:
                parts.append(seen.tail[:, :, :, : length - seen.start])
            length, key = min(length, seen.start), seen.parent
        return parts[::-1]

    def add(self, weights: str, tokens: Ints, keys_values: torch.Tensor) -> None:
        """Remember a sequence."""
        parent, start = self._longest(weights, tokens)
        while parent is not None and self._entries[parent].start >= start:
            parent = self._entries[parent].parent
        key = parent
        if start < len(tokens):
            key, self._next = self._next, self._next + 1
            tail = keys_values[:, :, :, start:].clone() if start else keys_values
            if _size(tail) > self._max_bytes:
                return
            self._entries[key] = _Seen(weights, np.array(tokens), parent, start, tail)
            self._bytes += _size(tail)
        self._touch(key)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def forget(self, weights: str) -> None:
        """Drop everything that those weights computed."""
        for key in [key for key, seen in self._entries.items() if seen.owner == weights]:
            self._drop(key)

    def _longest(self, weights: str, tokens: Ints) -> tuple[int | None, int]:
        """Return the entry that has the most of `tokens` for its beginning, and how many that is."""
        best, best_length = None, 0
        for key, seen in self._entries.items():
            if seen.owner == weights and (length := common_prefix(seen.tokens, tokens)) > best_length:
                best, best_length = key, length
        return best, best_length

    def _touch(self, key: int | None) -> None:
        while key is not None:
            self._entries.move_to_end(key)
            key = self._entries[key].parent

    def _drop(self, key: int) -> None:
        self._bytes -= _size(self._entries.pop(key).tail)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
