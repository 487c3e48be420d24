"""Returns large blocks to the operating system as soon as they are freed.

By default, after the first large body is freed glibc keeps blocks of that size in its heap (mallopt(3),
"dynamic mmap threshold"). Long-lived small objects then end up between such blocks, and the memory of a few
20 MB bodies stays with the process: as much as a thousand open streams need. A threshold set explicitly is
not adjusted. It is above the size of ordinary bodies, because a mapped block costs a system call and a page
fault for every 4 KiB.

Does nothing on other C libraries (musl and macOS return large blocks anyway).
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_M_TRIM_THRESHOLD: Final = -1  # names and numbers of malloc.h
_M_MMAP_THRESHOLD: Final = -3

MAPPED_FROM_BYTES: Final = 1 << 20
"""Blocks of this size or more are mapped individually and unmapped when freed."""
KEPT_TOP_BYTES: Final = 8 << 20
"""Free memory that the heap may keep at its end; with less, bursts of bodies would keep resizing it."""


def return_large_blocks() -> None:
    """Set both thresholds of this process, unless its environment configures glibc."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEPT_TOP_BYTES)
