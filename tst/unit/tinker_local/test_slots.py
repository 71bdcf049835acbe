"""Slots and the prefix cache: what is where after sequences come and go."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinker_local.slots import PrefixCache, Slots


def keys_values(length, value):
    """Keys and values [2, 1 layer, 1 head, length, 1] that all hold `value`."""
    return torch.full((2, 1, 1, length, 1), float(value))


def length_of(parts):
    """How many tokens the parts of a past hold."""
    return sum(part.shape[3] for part in parts)


def test_the_last_sequence_fills_the_hole():
    """After a sequence leaves, the last one has its index and its own content."""
    slots = Slots()
    for length, value in ((3, 1), (70, 2), (5, 3)):
        slots.add(keys_values(length, value))
    slots.remove(0)
    assert slots.lengths == [5, 70]
    assert torch.equal(slots.read(0), keys_values(5, 3))
    assert torch.equal(slots.read(1), keys_values(70, 2))


def test_growing_keeps_what_is_there():
    """When a sequence reaches the capacity the store grows around the others."""
    slots = Slots()
    slots.add(keys_values(63, 1))
    slots.add(keys_values(2, 2))
    slots.lengths[0] = 64
    slots.grow()
    assert slots.store.shape[4] > 64
    assert torch.equal(slots.read(1), keys_values(2, 2))


def test_the_longest_beginning_is_found_and_one_token_left():
    """A known sequence serves as the beginning of another, never as all of it."""
    cache = PrefixCache(max_bytes=1 << 20)
    cache.add("a", np.array([1, 2, 3]), keys_values(3, 1))
    assert length_of(cache.find("a", np.array([1, 2, 3]))) == 2
    assert length_of(cache.find("a", np.array([1, 2, 3, 4]))) == 3
    assert cache.find("a", np.array([9])) == []


def test_other_weights_share_nothing():
    """What one adapter computed is no beginning for another, and is gone when forgotten."""
    cache = PrefixCache(max_bytes=1 << 20)
    cache.add("a", np.array([1, 2]), keys_values(2, 1))
    assert cache.find("b", np.array([1, 2, 3])) == []
    cache.forget("a")
    assert cache.find("a", np.array([1, 2, 3])) == []


def test_the_oldest_go_when_memory_is_full():
    """The cache keeps to its bytes and drops what was used longest ago."""
    cache = PrefixCache(max_bytes=2 * 2 * 4 * 4)
    for first in (1, 2):
        cache.add("a", np.array([first, 0, 0, 0]), keys_values(4, first))
    cache.find("a", np.array([1, 0]))
    cache.add("a", np.array([3, 0, 0, 0]), keys_values(4, 3))
    assert cache.find("a", np.array([2, 0])) == []
    assert length_of(cache.find("a", np.array([1, 0]))) == 1


def test_what_conversations_have_in_common_is_kept_once():
    """The turns of ten conversations with one beginning of 100 tokens fit in the memory of three whole ones."""
    common = np.arange(100)
    turns = [np.concatenate([common, np.full(10, 100 + i), np.full(10, 200 + i)]) for i in range(10)]
    cache = PrefixCache(max_bytes=3 * 120 * 2 * 4)
    for length in (100, 110, 120):
        for i, tokens in enumerate(turns):
            cache.add(
                "a", tokens[:length], torch.cat([keys_values(100, 7), keys_values(20, i)], dim=3)[:, :, :, :length]
            )
    for i, tokens in enumerate(turns):
        found = torch.cat(cache.find("a", np.append(tokens, 9)), dim=3)
        assert torch.equal(found, torch.cat([keys_values(100, 7), keys_values(20, i)], dim=3))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), max_size=30), st.integers(1, 40))
def test_what_is_found_is_what_was_added(sequences, tokens):
    """Whatever overlaps and whatever was dropped: a beginning's keys and values are those of its own tokens, and the
    cache keeps to its bytes."""
    cache = PrefixCache(max_bytes=tokens * 2 * 4)
    for number, sequence in enumerate(sequences):
        prefixes = [int("1" + "".join(map(str, sequence[: end + 1])), 2) for end in range(len(sequence))]
        known = torch.tensor(prefixes, dtype=torch.float32).view(1, 1, 1, -1, 1).expand(2, 1, 1, -1, 1)
        found = cache.find("a", np.array([*sequence, 5]))
        if found:
            assert torch.equal(torch.cat(found, dim=3), known[:, :, :, : length_of(found)])
        cache.add("a", np.array(sequence), known)
        assert sum(seen.tail.numel() * 4 for seen in cache._entries.values()) <= tokens * 2 * 4, number
        parents = {seen.parent for seen in cache._entries.values()} - {None}
        assert parents <= cache._entries.keys()
