"""When memory goes back to the operating system: large blocks as soon as they are let go.

Left alone, glibc learns from the first large body that is freed to keep blocks of that size in its heap
(mallopt(3), "dynamic mmap threshold"). Small objects that live long then settle between such blocks, and the
room of a few 20 MB bodies stays with the process for good: as much as a thousand open streams need.
A threshold that is set stays as it is set. It stands above the bodies of ordinary turns, because a mapped
block costs a system call and a page fault for every 4 KiB.

Does nothing on other C libraries (musl and macOS return large blocks by themselves).
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_M_TRIM_THRESHOLD: Final = -1  # names and numbers of malloc.h
_M_MMAP_THRESHOLD: Final = -3

MAPPED_FROM_BYTES: Final = 1 << 20
"""Blocks of this size and more are mapped, each for itself, and unmapped when freed."""
KEPT_TOP_BYTES: Final = 8 << 20
"""How much the heap may hold free at its end; less, and bursts of bodies would grow and shrink it all day."""


def return_large_blocks() -> None:
    """Set both thresholds of this process, unless its environment says what glibc is to do."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEPT_TOP_BYTES)
