"""One KV arena, allocated once: numpy memory on the host, CuPy memory on a device.

Decisions: a single allocation that never moves, so that block ids stay valid for the life of the process and
no allocator is on the hot path. torch uses it through DLPack without copying, as raw bytes (uint8), because
CuPy and numpy have no bf16 or fp8. The arena object owns the memory: keep it while a view exists. It does not
know who uses which block.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paged_kv.layout import KVLayout

if TYPE_CHECKING:
    import torch

HOST_ALIGNMENT_BYTES = 4096  # a page: permits O_DIRECT and later registration as pinned memory


def allocate_host_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Return page-aligned zeroed host memory of exactly `size` bytes; pages are touched only when used."""
    raw = np.zeros(size + HOST_ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % HOST_ALIGNMENT_BYTES
    return raw[start : start + size]


def allocate_pinned_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Return page-locked host memory of exactly `size` bytes, for asynchronous transfers; needs a device.

    Not from the pools of CuPy or torch, because they round pinned memory up to a power of two.
    """
    import cupy

    pinned = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(size), 0)
    return np.frombuffer(pinned, np.uint8, size)


def allocate_device_bytes(size: int, device_id: int) -> Any:
    """Return a zeroed CuPy uint8 array. Not from CuPy's pool, which would round and recycle it."""
    import cupy

    with cupy.cuda.Device(device_id):
        array = cupy.ndarray((size,), cupy.uint8, cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0))
        array.fill(0)
    return array


def free_memory_bytes(device: str = "cpu") -> int:
    """Return the bytes that a new arena could use now; on the host, within the cgroup limit."""
    if device.startswith("cuda"):
        import cupy

        with cupy.cuda.Device(_device_id(device)):
            return int(cupy.cuda.runtime.memGetInfo()[0])
    meminfo = Path("/proc/meminfo").read_text()
    available = next(
        int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable")
    )
    limit_file, used_file = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit_file.exists() and used_file.exists() and (limit := limit_file.read_text().strip()) != "max":
        available = min(available, max(0, int(limit) - int(used_file.read_text())))
    return available


def check_rows(layout: KVLayout, block_ids: list[int], rows: "torch.Tensor") -> None:
    """Raise unless all these blocks exist and `rows` is (len(block_ids), block_bytes) bytes."""
    if rows.shape != (len(block_ids), layout.block_bytes) or rows.element_size() != 1:
        raise ValueError(
            f"{len(block_ids)} blocks are {len(block_ids)} rows of {layout.block_bytes} bytes, "
            f"got {tuple(rows.shape)} of {rows.dtype}"
        )
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < layout.num_blocks:
        raise IndexError(f"blocks {min(block_ids)} to {max(block_ids)} of {layout.num_blocks}")


def _device_id(device: str) -> int:
    return int(device.partition(":")[2] or 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVArena:
    """The memory of all blocks. `storage` is (total_bytes,) uint8: numpy on "cpu", CuPy on "cuda:N"."""

    layout: KVLayout
    device: str
    storage: Any

    @classmethod
    def allocate(cls, layout: KVLayout, device: str = "cpu") -> "KVArena":
        """Allocate all blocks, zeroed."""
        if device == "cpu":
            return cls(layout=layout, device=device, storage=allocate_host_bytes(layout.total_bytes))
        if not device.startswith("cuda"):
            raise ValueError(f"a KV arena must be on cpu or cuda:N, not on {device!r}")
        storage = allocate_device_bytes(layout.total_bytes, _device_id(device))
        return cls(layout=layout, device=device, storage=storage)

    @property
    def is_host(self) -> bool:
        """True if the arena is in host memory."""
        return self.device == "cpu"

    def tensor(self) -> "torch.Tensor":
        """Return the arena as a torch tensor (total_bytes,) uint8 that shares this memory."""
        import torch

        return torch.utils.dlpack.from_dlpack(self.storage)

    def host_view(self) -> npt.NDArray[np.uint8]:
        """Return the arena as (num_blocks, block_bytes) bytes in place; host arenas only."""
        if not self.is_host:
            raise ValueError(f"the arena is on {self.device}: read blocks with read_block")
        view: npt.NDArray[np.uint8] = self.storage.reshape(self.layout.num_blocks, self.layout.block_bytes)
        return view

    def read_block(self, block_id: int) -> bytes:
        """Return the bytes of one block, all layers, scales included. On a device this waits for the copy."""
        block = self._block(block_id)
        return bytes(block if self.is_host else block.get())

    def write_block(self, block_id: int, data: bytes) -> None:
        """Write bytes that read_block of an arena with the same layout returned. Changes: one block."""
        if len(data) != self.layout.block_bytes:
            raise ValueError(f"a block is {self.layout.block_bytes} bytes, got {len(data)}")
        values = np.frombuffer(data, np.uint8)
        if self.is_host:
            self._block(block_id)[:] = values
        else:
            self._block(block_id).set(values)

    def _block(self, block_id: int) -> Any:
        if not 0 <= block_id < self.layout.num_blocks:
            raise IndexError(f"block {block_id} of {self.layout.num_blocks}")
        start = block_id * self.layout.block_bytes
        return self.storage[start : start + self.layout.block_bytes]
