"""Packs token sequences into rows in which a shared beginning is computed once.

In a causal model the hidden state of a token depends only on the tokens before it. Sequences that begin alike can
therefore share the computation of that beginning, exactly, forward and backward. Sorted, the sequences that share
most are neighbours, so each one adds only what follows its common prefix with the one before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """Row tokens [start, stop), which attend to the row's `context` tokens and, causally, to themselves."""

    start: int
    stop: int
    context: Ints


@dataclass(frozen=True)
class Row:
    """A packed row of N tokens.

    `paths[i]` holds the row index of every token of the sequence `members[i]`, so the hidden states of that sequence
    are `hidden[paths[i]]`.
    """

    tokens: Ints
    positions: Ints
    segments: tuple[Segment, ...]
    members: tuple[int, ...]
    paths: tuple[Ints, ...]


def common_prefix(left: Ints, right: Ints) -> int:
    """Return how many leading tokens the two sequences share."""
    shortest = min(len(left), len(right))
    different = np.flatnonzero(left[:shortest] != right[:shortest])
    return int(different[0]) if len(different) else shortest


def pack(sequences: Sequence[Ints], *, budget: int) -> list[Row]:
    """Pack the sequences into rows of at most `budget` tokens each (a longer sequence gets a row to itself)."""
    order = sorted(range(len(sequences)), key=lambda index: tuple(sequences[index]))
    rows: list[Row] = []
    members: list[int] = []
    used = 0
    for index in order:
        tokens = sequences[index]
        shared = common_prefix(sequences[members[-1]], tokens) if members else 0
        if members and used + len(tokens) - shared > budget:
            rows.append(_row(sequences, members))
            members, used, shared = [], 0, 0
        members.append(index)
        used += len(tokens) - shared
    if members:
        rows.append(_row(sequences, members))
    return rows


def side_by_side(sequences: Sequence[Ints], offsets: Sequence[int]) -> Row:
    """Put sequences into one row, each with positions from its own offset; what they begin with is not shared."""
    ends = np.cumsum([len(sequence) for sequence in sequences])
    spans = [(int(end) - len(sequence), int(end)) for sequence, end in zip(sequences, ends, strict=True)]
    return Row(
        np.concatenate(sequences),
        np.concatenate([np.arange(at, at + len(each)) for each, at in zip(sequences, offsets, strict=True)]),
        tuple(Segment(start, stop, np.empty(0, np.int64)) for start, stop in spans),
        tuple(range(len(sequences))),
        tuple(np.arange(start, stop) for start, stop in spans),
    )


def _row(sequences: Sequence[Ints], members: list[int]) -> Row:
    tokens: list[Ints] = []
    positions: list[Ints] = []
    segments: list[Segment] = []
    paths: list[Ints] = []
    end = 0
    for rank, member in enumerate(members):
        sequence = sequences[member]
        shared = common_prefix(sequences[members[rank - 1]], sequence) if rank else 0
        context = paths[-1][:shared] if shared else np.empty(0, np.int64)
        fresh = len(sequence) - shared
        if fresh:
            segments.append(Segment(start=end, stop=end + fresh, context=context))
            tokens.append(sequence[shared:])
            positions.append(np.arange(shared, len(sequence)))
        paths.append(np.concatenate([context, np.arange(end, end + fresh)]))
        end += fresh
    return Row(np.concatenate(tokens), np.concatenate(positions), tuple(segments), tuple(members), tuple(paths))
