"""KV memory of the whole model: which layers are stored in which type, behind one set of block ids.

Block ids are the same everywhere. Layers of one storage type share an arena; layers that fell back to a
wider type (see `kv_selftest`) have a second one with as many blocks. Windowed and full layers differ only in
the attention backend over the same arena.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_adapter.engine.model import LayerAttention
from engine_adapter.engine.model_config import ModelConfig
from paged_kv.attention import AttentionBackend, make_backend
from paged_kv.layout import KVDtype, KVLayout
from paged_kv.memory import KVArena


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

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block in every layer. Changes: the destination."""
        for backend in self._backend_of_arena.values():
            backend.copy_blocks([(source, destination)])

    def read_block(self, block_id: int) -> bytes:
        """Return one block's bytes, arena after arena, in the order of `arenas`."""
        return b"".join(self._backend_of_arena[dtype].read_block(block_id) for dtype in self.arenas)

    def write_block(self, block_id: int, data: bytes) -> None:
        """Changes: one block, to bytes from `read_block` of a storage of the same shape."""
        if len(data) != self.block_bytes:
            raise ValueError(f"a block is {self.block_bytes} bytes, got {len(data)}")
        start = 0
        for dtype, arena in self.arenas.items():
            end = start + arena.layout.block_bytes
            self._backend_of_arena[dtype].write_block(block_id, data[start:end])
            start = end


def block_bytes(config: ModelConfig, *, block_size: int, layer_dtypes: Sequence[KVDtype]) -> int:
    """Return the bytes that one block takes over all layers, before anything is allocated."""
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
