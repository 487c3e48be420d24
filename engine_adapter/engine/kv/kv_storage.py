"""KV memory of the whole model: all layers, addressed by one set of block ids.

Layers with the same storage type share an arena; layers that fell back to a wider type (see `kv_selftest`)
share a second one with the same number of blocks. Layers with and without a sliding window differ only in
the attention backend over the same arena.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engine_adapter.engine.model.model_config import ModelConfig
from paged_kv.arena import KVArena
from paged_kv.backends.attention import AttentionBackend, make_backend
from paged_kv.batch import AttentionBatch
from paged_kv.layout import KVDtype, KVLayout


class LayerAttention:
    """Attention of one layer: a backend, and the layer's index in that backend's arena."""

    def __init__(self, backend: AttentionBackend, layer: int) -> None:
        self._backend, self._layer = backend, layer

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Store key and value, then attend. Changes: KV at the batch's slots."""
        self._backend.write_kv(self._layer, key, value, batch)
        return self._backend.attend(self._layer, query, key, value, batch)


class KVStorage:
    """Arenas and, per layer, the backend that reads and writes it."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        layer_dtypes: Sequence[KVDtype],
        backend: str = "torch",
        device: str = "cpu",
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.layer_dtypes = tuple(layer_dtypes)
        members: dict[KVDtype, list[int]] = {}
        for layer, dtype in enumerate(layer_dtypes):
            members.setdefault(dtype, []).append(layer)
        self.arenas = {
            dtype: KVArena.allocate(
                _layout(
                    config, num_layers=len(layers), num_blocks=num_blocks, block_size=block_size, dtype=dtype
                ),
                device,
            )
            for dtype, layers in members.items()
        }
        backends: dict[tuple[KVDtype, int | None], AttentionBackend] = {}
        self.layers: list[LayerAttention] = []
        for layer, dtype in enumerate(layer_dtypes):
            key = (dtype, config.window_of_layer(layer))
            if key not in backends:
                backends[key] = make_backend(
                    backend,
                    self.arenas[dtype],
                    num_heads=config.num_attention_heads,
                    scale=config.head_dim**-0.5,
                    sliding_window=key[1],
                )
            self.layers.append(LayerAttention(backends[key], members[dtype].index(layer)))
        self._backend_of_arena = {dtype: used for (dtype, _), used in backends.items()}

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and arenas."""
        return sum(arena.layout.block_bytes for arena in self.arenas.values())

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size

    @property
    def is_host(self) -> bool:
        """True if the blocks are in ordinary memory."""
        return all(arena.is_host for arena in self.arenas.values())

    def allocate_rows(self, num_blocks: int) -> torch.Tensor:
        """Return host rows (num_blocks, block_bytes) uint8, page-locked if a device fills them."""
        shape = (num_blocks, self.block_bytes)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=not self.is_host)

    def read_blocks(self, block_ids: list[int], out: torch.Tensor) -> None:
        """Copy blocks to host rows (len(block_ids), block_bytes) uint8, arena after arena in each row.

        On a device, `out` is complete once torch's current stream has passed the call.
        """
        for columns, backend in self._columns(out):
            backend.read_blocks(block_ids, columns)

    def write_blocks(self, block_ids: list[int], data: torch.Tensor) -> None:
        """Write host rows that `read_blocks` of an equal storage returned. Changes: the blocks."""
        for columns, backend in self._columns(data):
            backend.write_blocks(block_ids, columns)

    def _columns(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, AttentionBackend]]:
        """Yield each arena's part of the rows with the backend that moves it."""
        if rows.shape[1] != self.block_bytes:
            raise ValueError(f"a block is {self.block_bytes} bytes, got {rows.shape[1]}")
        start = 0
        for dtype, arena in self.arenas.items():
            end = start + arena.layout.block_bytes
            yield rows[:, start:end], self._backend_of_arena[dtype]
            start = end

    def read_block(self, block_id: int) -> bytes:
        """Return one block's bytes, arena after arena in the order of `arenas`; waits for the device."""
        return b"".join(self._backend_of_arena[dtype].read_block(block_id) for dtype in self.arenas)

    def write_block(self, block_id: int, data: bytes) -> None:
        """Write bytes that `read_block` of an equal storage returned. Changes: one block."""
        self.write_blocks([block_id], torch.frombuffer(bytearray(data), dtype=torch.uint8)[None])

    def checksum(self, block_id: int) -> int:
        """Return a 64-bit checksum of one block over all arenas, computed in place."""
        sums = [self._backend_of_arena[dtype].checksum(block_id) for dtype in self.arenas]
        return sum(value * (index + 1) for index, value in enumerate(sums)) % (1 << 64)


def block_bytes(config: ModelConfig, *, block_size: int, layer_dtypes: Sequence[KVDtype]) -> int:
    """Return the bytes of one block over all layers, before anything is allocated."""
    return sum(
        _layout(config, num_layers=1, num_blocks=1, block_size=block_size, dtype=dtype).block_bytes
        for dtype in layer_dtypes
    )


def _layout(
    config: ModelConfig, *, num_layers: int, num_blocks: int, block_size: int, dtype: KVDtype
) -> KVLayout:
    return KVLayout(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
