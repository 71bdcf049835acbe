"""Slots and the prefix cache: what is where after sequences come and go."""

import numpy as np
import torch

from tinker_local.slots import PrefixCache, Slots


def keys_values(length, value):
    """Keys and values [2, 1 layer, 1 head, length, 1] that all hold `value`."""
    return torch.full((2, 1, 1, length, 1), float(value))


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
    assert cache.find("a", np.array([1, 2, 3])).shape[3] == 2
    assert cache.find("a", np.array([1, 2, 3, 4])).shape[3] == 3
    assert cache.find("a", np.array([9])) is None


def test_other_weights_share_nothing():
    """What one adapter computed is no beginning for another, and is gone when forgotten."""
    cache = PrefixCache(max_bytes=1 << 20)
    cache.add("a", np.array([1, 2]), keys_values(2, 1))
    assert cache.find("b", np.array([1, 2, 3])) is None
    cache.forget("a")
    assert cache.find("a", np.array([1, 2, 3])) is None


def test_the_oldest_go_when_memory_is_full():
    """The cache keeps to its bytes and drops what was used longest ago."""
    cache = PrefixCache(max_bytes=2 * 2 * 4 * 4)
    for first in (1, 2):
        cache.add("a", np.array([first, 0, 0, 0]), keys_values(4, first))
    cache.find("a", np.array([1, 0]))
    cache.add("a", np.array([3, 0, 0, 0]), keys_values(4, 3))
    assert cache.find("a", np.array([2, 0])) is None
    assert cache.find("a", np.array([1, 0])) is not None
