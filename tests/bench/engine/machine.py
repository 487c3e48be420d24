"""The machine under the benchmark: what it is, what its memory gives, and how much of it others used.

Memory bandwidth is the rate at which `num_threads` threads read a buffer far larger than any cache: what a
decode step, which reads all weights once, could reach at best.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import time
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[3]
BUFFER_BYTES = 256 << 20
NUM_PASSES = 4
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """How many CPUs others kept busy since it was made; ask when all our children have been waited for."""

    def __init__(self) -> None:
        self._start_s, self._busy_s, self._ours_s = time.monotonic(), _busy_s(), _own_cpu_s()

    def num_cpus(self) -> float:
        elapsed_s = time.monotonic() - self._start_s
        others_s = (_busy_s() - self._busy_s) - (_own_cpu_s() - self._ours_s)
        return max(others_s, 0.0) / elapsed_s


def _busy_s() -> float:
    """Time that all CPUs together spent not idle since the machine started, in s."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS_PER_S  # less idle and waiting for disks


def _own_cpu_s() -> float:
    usages = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class MemoryProbe:
    """A buffer to read through."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._buffer = torch.ones(BUFFER_BYTES // 4)

    def bytes_per_s(self) -> float:
        """Return the best of a few passes."""
        torch.set_num_threads(self._num_threads)
        best_s = float("inf")
        for _ in range(NUM_PASSES):
            start_s = time.perf_counter()
            self._buffer.sum()
            best_s = min(best_s, time.perf_counter() - start_s)
        return BUFFER_BYTES / best_s


def describe(command: str) -> dict[str, str]:
    """Return what a reader needs to repeat the run, without anything that names this machine's folders."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    changes = subprocess.run(
        ["git", "status", "--porcelain", "engine_adapter", "cuda"],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    cpu = Path("/proc/cpuinfo").read_text()
    names = [line.partition(": ")[2] for line in cpu.splitlines() if line.startswith("model name")]
    fast = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag} " in cpu]
    return {
        "command": command,
        "commit": commit.stdout.strip() + (" with changes" if changes.stdout.strip() else ""),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} × {names[0] if names else 'unknown'} ({', '.join(fast)})",
        "software": f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
    }
