"""The oracle: every operation on paged KV in plain numpy loops, written for readability, not speed.

Every kernel and every other backend is tested against these functions. Attention computes in float64, so that
differences are the other side's rounding. Invariant: a slot outside a sequence's context is never read, so
garbage there (such as poison) cannot reach a result.
"""

import numpy as np
import numpy.typing as npt

from paged_kv import codec
from paged_kv.batch import AttentionBatch
from paged_kv.codec import ByteArray, FloatArray, HalfArray
from paged_kv.layout import KVLayout

CHECKSUM_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring positions differ in all bits
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64's finaliser


def _tile(
    arena: ByteArray, layout: KVLayout, block_id: int, layer: int, is_value: bool, head: int
) -> ByteArray:
    start = layout.tile_id(block_id=block_id, layer=layer, is_value=is_value, head=head) * layout.tile_bytes
    return arena[start : start + layout.tile_bytes]


def _row(tile: ByteArray, layout: KVLayout, offset: int) -> ByteArray:
    row_bytes = layout.head_dim * layout.dtype.item_bytes
    return tile[offset * row_bytes : (offset + 1) * row_bytes]


def _scales(tile: ByteArray, layout: KVLayout) -> HalfArray:
    return tile[layout.tile_data_bytes :].view(np.float16)


def write_rows(
    arena: ByteArray,
    layout: KVLayout,
    *,
    layer: int,
    is_value: bool,
    rows: FloatArray,
    slots: npt.NDArray[np.int64],
) -> None:
    """Store rows (num_tokens, num_kv_heads, head_dim) at their slots. Changes: arena."""
    stored, scales = codec.encode_rows(rows, layout.dtype)
    for token, slot in enumerate(slots.tolist()):
        block_id, offset = divmod(slot, layout.block_size)
        for head in range(layout.num_kv_heads):
            tile = _tile(arena, layout, block_id, layer, is_value, head)
            _row(tile, layout, offset)[:] = stored[token, head]
            if scales is not None:
                _scales(tile, layout)[offset] = scales[token, head]


def read_rows(
    arena: ByteArray,
    layout: KVLayout,
    *,
    layer: int,
    is_value: bool,
    head: int,
    block_table: list[int],
    start: int,
    stop: int,
) -> FloatArray:
    """Return tokens start..stop-1 of a sequence as float32 (stop - start, head_dim)."""
    out = np.empty((stop - start, layout.head_dim), np.float32)
    for position in range(start, stop):
        block_id, offset = block_table[position // layout.block_size], position % layout.block_size
        tile = _tile(arena, layout, block_id, layer, is_value, head)
        scale = _scales(tile, layout)[offset : offset + 1] if layout.dtype.is_quantised else None
        out[position - start] = codec.decode_rows(_row(tile, layout, offset)[None], scale, layout.dtype)[0]
    return out


def attend(
    arena: ByteArray,
    layout: KVLayout,
    batch: AttentionBatch,
    query: FloatArray,
    *,
    layer: int,
    scale: float,
    sliding_window: int | None = None,
) -> FloatArray:
    """Causal attention of every new token over its blocks: query (num_tokens, num_heads, head_dim)."""
    out = np.empty_like(query)
    group = query.shape[1] // layout.num_kv_heads
    for index, start in enumerate(batch.query_starts[:-1]):
        first_position = batch.context_lens[index] - batch.query_lens[index]
        table = batch.block_tables[index]
        for step in range(batch.query_lens[index]):
            stop = first_position + step + 1
            begin = 0 if sliding_window is None else max(0, stop - sliding_window)
            for head in range(layout.num_kv_heads):
                keys, values = (
                    read_rows(
                        arena,
                        layout,
                        layer=layer,
                        is_value=is_value,
                        head=head,
                        block_table=table,
                        start=begin,
                        stop=stop,
                    )
                    for is_value in (False, True)
                )
                heads = slice(head * group, (head + 1) * group)
                out[start + step, heads] = _softmax_mix(query[start + step, heads], keys, values, scale)
    return out


def _softmax_mix(query: FloatArray, keys: FloatArray, values: FloatArray, scale: float) -> FloatArray:
    scores = query.astype(np.float64) @ keys.astype(np.float64).T * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = weights @ values.astype(np.float64) / weights.sum(axis=-1, keepdims=True)
    return np.asarray(mixed, np.float32)


def checksum(block: ByteArray) -> int:
    """Return a 64-bit sum of a block: each 8-byte word mixed with its position, the results added mod 2^64.

    Addition is commutative, so the number and order of threads do not matter; mixing with the position
    detects swapped words. It detects accidents, not attackers.
    """
    words = np.ascontiguousarray(block).view(np.uint64)
    with np.errstate(over="ignore"):
        mixed = words + np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(CHECKSUM_STEP)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
        mixed ^= mixed >> np.uint64(31)
        return int(mixed.sum(dtype=np.uint64))
