"""What large bodies leave behind in the process: nothing that the operating system could have."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Large blocks, small ones above them that stay, and what is still resident when the large ones are gone.
# The first large block is what glibc learns from.
PROGRAM = """
import ctypes, os, sys
from gateway.process.malloc import return_large_blocks

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "returned":
    return_large_blocks()
bytes(20_000_000)
before = resident_bytes()
large = [b"x" * 20_000_000 for _ in range(2)]
small = [bytearray(4_096) for _ in range(500)]  # fill the gaps of the heap, then lie above
large.clear()
print(resident_bytes() - before)
"""


def left_behind_bytes(argument: str, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument],
        capture_output=True,
        check=True,
        timeout=60,
        env=environment | variables,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries return large blocks")
def test_large_blocks_leave_nothing_resident() -> None:
    """Two blocks of 20 MB with small ones above them: glibc alone keeps their room, we give it back."""
    assert left_behind_bytes("kept") > 30_000_000
    assert left_behind_bytes("returned") < 5_000_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries return large blocks")
def test_a_threshold_of_the_operator_stays() -> None:
    """Who sets glibc's own variable gets what it says: here, no mapped blocks at all."""
    assert left_behind_bytes("returned", MALLOC_MMAP_THRESHOLD_="33554432") > 30_000_000
