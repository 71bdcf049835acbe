"""Keeps freed memory from staying with the process, where the C library lets one ask for that (glibc)."""

import ctypes
from typing import Any

# Numbers of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# Blocks of this size or above go back to the system when they are freed, to be cleared anew for the next. A row's
# activations in the default model are of 1.4 and 3.8 MB: kept in the heap, a pass takes a fifth less time.
_LARGE = 4 << 20
# The heap itself is given back by `trim` alone, after a pass, and not between two of its layers.
_KEPT = 1 << 30


def return_freed() -> None:
    """Give large blocks back when they are freed, and let all threads share one heap.

    Left alone, glibc raises the size from which it does so to 32 MB and gives the worker's thread heaps of its own,
    which key-value caches of changing sizes leave full of holes: with the default model, more than a gigabyte.
    """
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_ARENA_MAX, 1)


def trim() -> None:
    """Give back what is free in the heap: after a pass, the smaller blocks of its activations."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _function(name: str) -> Any | None:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
