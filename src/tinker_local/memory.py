"""Keeps freed memory from staying with the process, where the C library lets one ask for that (glibc)."""

import ctypes

# Numbers of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE = 4 << 20  # what torch frees of this size or above goes back to the system at once
_KEPT = 128 << 20  # free memory at the heap's end that may stay


def return_freed() -> None:
    """Give large blocks back when they are freed, and let all threads share one heap.

    Left alone, glibc raises the size from which it does so to 32 MB and gives the worker's thread heaps of its own,
    which key-value caches of changing sizes leave full of holes: with the default model, more than a gigabyte.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for option, value in ((_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, _KEPT), (_ARENA_MAX, 1)):
        mallopt(option, value)
