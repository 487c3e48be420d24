"""Where each KV value is in the arena: the only place that turns (block, layer, K or V, head) into bytes.

The arena is an array of equal *tiles*. A tile holds one KV head of one layer of one block, K or V:

    tile  = [block_size][head_dim] values, then [block_size] fp16 scales (quantised types only), then
            zero to seven unused scales up to the alignment
    block = [num_layers][K, V][num_kv_heads] tiles                 (contiguous: `block_bytes`)
    arena = [num_blocks] blocks                                    (contiguous: `total_bytes`)

Reasons: a block of all layers is contiguous, so moving it to another tier or computing its checksum is one
memory access of `block_bytes` (2 MiB for an 8B Llama in bf16) instead of 2 x num_layers small ones. Inside a
block the head comes before the token, so one attention group reads whole tiles front to back. Scales are in
their tile, so one gather reads both and no transfer can lose one of them. The price: one layer of a sequence
is strided by `block_bytes`, which costs address-translation misses on a GPU if a block is much smaller than a
page.

Invariant: `tile_bytes` is a multiple of 16, so every tile starts on a vector-load boundary. This module does
not know devices, allocators or the meaning of a block.
"""

import enum
import re
from dataclasses import dataclass

TILE_ALIGNMENT_BYTES = 16  # one 128-bit load, the widest a CUDA thread issues
# fp16, see codec: bf16 would change a row's largest value, which decides its scores, by 0.4 %
SCALE_BYTES = 2


class KVDtype(enum.Enum):
    """How a K or V value is stored."""

    FLOAT32 = "fp32"
    BFLOAT16 = "bf16"
    FLOAT16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"  # the "fn" variant: largest finite value 448, no infinity
    INT8 = "int8"

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored value."""
        return {KVDtype.FLOAT32: 4, KVDtype.BFLOAT16: 2, KVDtype.FLOAT16: 2}.get(self, 1)

    @property
    def is_quantised(self) -> bool:
        """True if each (token, head) row has a scale."""
        return self in (KVDtype.FP8_E4M3, KVDtype.INT8)

    @property
    def max_magnitude(self) -> float:
        """Largest value of a quantised row; a row's largest element is scaled to it."""
        return {KVDtype.FP8_E4M3: 448.0, KVDtype.INT8: 127.0}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape and byte strides of one KV arena."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype

    def __post_init__(self) -> None:
        """Raise ValueError for a shape that no kernel can address."""
        for name in ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVLayout.{name} must be at least 1, got {getattr(self, name)}")
        if self.tile_bytes % TILE_ALIGNMENT_BYTES:
            raise ValueError(
                f"a tile of {self.block_size} tokens x {self.head_dim} {self.dtype.value} values is "
                f"{self.tile_bytes} bytes, not a multiple of {TILE_ALIGNMENT_BYTES}: use a larger block size"
            )

    @property
    def tile_values(self) -> int:
        """Values in one tile."""
        return self.block_size * self.head_dim

    @property
    def tile_data_bytes(self) -> int:
        """Bytes of the values of one tile; its scales, if any, follow."""
        return self.tile_values * self.dtype.item_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes from one tile to the next."""
        return self.tile_data_bytes + self.tile_scale_bytes

    @property
    def tile_scale_bytes(self) -> int:
        """Bytes of the scales of one tile, padded to the alignment; 0 for plain types."""
        if not self.dtype.is_quantised:
            return 0
        return -(-self.block_size * SCALE_BYTES // TILE_ALIGNMENT_BYTES) * TILE_ALIGNMENT_BYTES

    @property
    def tiles_per_layer(self) -> int:
        """Tiles that one layer has in one block: K and V of every head."""
        return 2 * self.num_kv_heads

    @property
    def tiles_per_block(self) -> int:
        """Tiles of one block, all layers."""
        return self.num_layers * self.tiles_per_layer

    @property
    def num_tiles(self) -> int:
        """Tiles of the arena."""
        return self.num_blocks * self.tiles_per_block

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer inside one block: the unit of layer-wise loading."""
        return self.tiles_per_layer * self.tile_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, K and V, scales included."""
        return self.tiles_per_block * self.tile_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token occupies over all layers, K and V, scales included."""
        return self.block_bytes // self.block_size

    @property
    def total_bytes(self) -> int:
        """Bytes of the arena."""
        return self.num_blocks * self.block_bytes

    @property
    def num_slots(self) -> int:
        """Token positions of the arena: slot = block_id * block_size + offset."""
        return self.num_blocks * self.block_size

    def tile_id(self, *, block_id: int, layer: int, is_value: bool, head: int) -> int:
        """Index of a tile; its first byte is `tile_id * tile_bytes`."""
        return (
            block_id * self.tiles_per_block
            + layer * self.tiles_per_layer
            + is_value * self.num_kv_heads
            + head
        )

    @classmethod
    def fit(
        cls,
        memory_bytes: int,
        *,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: KVDtype,
    ) -> int:
        """Return how many blocks of this shape fit into `memory_bytes`; raise ValueError if none does."""
        one = cls(
            num_layers=num_layers,
            num_blocks=1,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        )
        num_blocks = memory_bytes // one.block_bytes
        if num_blocks < 1:
            raise ValueError(f"{memory_bytes} bytes do not hold a KV block of {one.block_bytes} bytes")
        return num_blocks


_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


def parse_size(setting: str, *, option: str) -> int:
    """Return the bytes of a size: `8GiB`, `500MB`, `1073741824`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", setting.lower())
    if match is None or match.group(2) not in _UNITS:
        raise ValueError(f"{option} {setting!r} is not a size such as 8GiB or 500MB")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def parse_kv_memory(setting: str, *, free_bytes: int) -> int:
    """Return the bytes of a `--kv-memory` setting.

    A number in (0, 1] is a share of `free_bytes`; anything else is a size (see `parse_size`).
    """
    try:
        share = float(setting)
    except ValueError:
        share = 0.0
    size = int(share * free_bytes) if 0 < share <= 1 else parse_size(setting, option="--kv-memory")
    if size < 1:
        raise ValueError(
            f"--kv-memory {setting!r} leaves no memory for the KV cache ({free_bytes} bytes are free)"
        )
    return size
