"""Checks that the model and its KV memory fit, before the kernel would kill the process.

Decides how free memory is read: the machine's `MemAvailable`, or the control group's limit if that is
smaller. If neither can be read, nothing is refused.
"""

from __future__ import annotations

from pathlib import Path

import torch

RESERVE_BYTES = 256 * 2**20  # interpreter, torch and activations of one step (measured: 200 MB)


class TooLittleMemory(Exception):
    """The message says how much is needed and how much is available."""


def check_memory(*, weight_bytes: int, kv_bytes: int, available: int | None) -> None:
    """Raise TooLittleMemory unless weights, KV memory and a reserve fit into `available` bytes."""
    needed = weight_bytes + kv_bytes + RESERVE_BYTES
    if available is not None and needed > available:
        raise TooLittleMemory(
            f"too little memory: weights {_gib(weight_bytes)} + KV {_gib(kv_bytes)} + {_gib(RESERVE_BYTES)} "
            f"are more than the {_gib(available)} available: lower --kv-memory or take a smaller model"
        )


def available_bytes(device: str) -> int | None:
    """Memory of the device that this process can still take, or None if unknown."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    values = [value for value in (_machine_available(), _control_group_available()) if value is not None]
    return min(values, default=None)


def _machine_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_group_available() -> int | None:
    """Version 2 only. The group counts its file cache as used, so that is added back."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
