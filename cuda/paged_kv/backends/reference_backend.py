"""The oracle as a backend: numpy on a host arena, for tests, not for serving."""

import numpy as np
import torch

from paged_kv import reference
from paged_kv.arena import KVArena, check_rows
from paged_kv.batch import AttentionBatch
from paged_kv.codec import FloatArray


def _to_numpy(tensor: torch.Tensor) -> FloatArray:
    return tensor.detach().to(device="cpu", dtype=torch.float32).numpy()


class ReferenceBackend:
    """AttentionBackend over `reference`. Each call loops over tokens and heads in Python."""

    def __init__(self, arena: KVArena, *, num_heads: int, scale: float, sliding_window: int | None) -> None:
        self._layout = arena.layout
        self._arena = arena
        self._bytes = arena.host_view().reshape(-1)
        self._num_heads = num_heads
        self._scale = scale
        self._sliding_window = sliding_window

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> None:
        """See AttentionBackend."""
        for is_value, rows in ((False, key), (True, value)):
            reference.write_rows(
                self._bytes,
                self._layout,
                layer=layer,
                is_value=is_value,
                rows=_to_numpy(rows),
                slots=batch.slot_mapping,
            )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        out = reference.attend(
            self._bytes,
            self._layout,
            batch,
            _to_numpy(query),
            layer=layer,
            scale=self._scale,
            sliding_window=self._sliding_window,
        )
        return torch.from_numpy(out).to(dtype=query.dtype, device=query.device)

    def read_blocks(self, block_ids: list[int], out: torch.Tensor) -> None:
        """See AttentionBackend."""
        check_rows(self._layout, block_ids, out)
        for row, block_id in zip(out, block_ids, strict=True):
            row.copy_(torch.frombuffer(bytearray(self.read_block(block_id)), dtype=torch.uint8))

    def write_blocks(self, block_ids: list[int], data: torch.Tensor) -> None:
        """See AttentionBackend."""
        check_rows(self._layout, block_ids, data)
        for row, block_id in zip(data, block_ids, strict=True):
            self.write_block(block_id, row.numpy().tobytes())

    def read_block(self, block_id: int) -> bytes:
        """See AttentionBackend."""
        return self._arena.read_block(block_id)

    def write_block(self, block_id: int, data: bytes) -> None:
        """See AttentionBackend."""
        self._arena.write_block(block_id, data)

    def checksum(self, block_id: int) -> int:
        """See AttentionBackend."""
        return reference.checksum(np.frombuffer(self._arena.read_block(block_id), np.uint8))
