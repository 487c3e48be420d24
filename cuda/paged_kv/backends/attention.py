"""The only interface to paged KV: write new tokens, attend over blocks, move blocks.

Decision: an engine uses an `AttentionBackend` and never touches arena bytes. Every backend stores the same
bytes for the same input (bit-exact, `codec` is the oracle), so blocks written by one can be read by another,
by a tier or by a later process. Invariants of every backend, tested by one contract suite:

- a slot outside a sequence's context never affects its result, whatever it contains (NaN included);
- chunking and batching change a sequence's result only by float32 rounding;
- if the KV type differs from the query's, new tokens are also read back from their blocks, so that a cached
  prefix and one that was just computed give the same attention.

This module imports neither torch nor CuPy; a backend does when it is created.
"""

from typing import TYPE_CHECKING, Protocol

from paged_kv.arena import KVArena
from paged_kv.batch import AttentionBatch

if TYPE_CHECKING:
    import torch

__all__ = ["BACKEND_NAMES", "AttentionBackend", "AttentionBatch", "make_backend"]

BACKEND_NAMES = ("reference", "torch", "cupy")


class AttentionBackend(Protocol):
    """Paged attention over one arena. A step runs on one thread, all work on torch's current stream."""

    def write_kv(self, layer: int, key: "torch.Tensor", value: "torch.Tensor", batch: AttentionBatch) -> None:
        """Store this step's keys and values (num_tokens, num_kv_heads, head_dim) at the batch's slots.

        Changes: the arena. Call before `attend` of the same layer.
        """

    def attend(
        self,
        layer: int,
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        batch: AttentionBatch,
    ) -> "torch.Tensor":
        """Causal attention: query (num_tokens, num_heads, head_dim) -> the same shape and dtype.

        `key` and `value` are those passed to `write_kv` for this layer; a prompt without earlier context may
        be computed from them without reading its blocks.
        """

    def read_blocks(self, block_ids: list[int], out: "torch.Tensor") -> None:
        """Copy blocks to host memory (len(block_ids), block_bytes) uint8, rows packed; one launch for all.

        On a device `out` is complete once torch's current stream has passed the call (pinned memory) or on
        return (pageable memory).
        """

    def write_blocks(self, block_ids: list[int], data: "torch.Tensor") -> None:
        """Write host rows that `read_blocks` of any backend with this layout made. Changes: the blocks."""

    def read_block(self, block_id: int) -> bytes:
        """Return one block's bytes, all layers, scales included; waits for the device."""

    def write_block(self, block_id: int, data: bytes) -> None:
        """Write the bytes that `read_block` of any backend with this layout returned. Changes: one block."""

    def checksum(self, block_id: int) -> int:
        """Return `reference.checksum` of one block, computed in place."""


def make_backend(
    name: str,
    arena: KVArena,
    *,
    num_heads: int,
    scale: float,
    sliding_window: int | None = None,
) -> AttentionBackend:
    """Return the named backend over an arena.

    Args:
        name: one of BACKEND_NAMES, or "auto": torch on a host arena, cupy on a device.
        num_heads: query heads, a multiple of the layout's KV heads.
        scale: multiplies the scores, usually head_dim ** -0.5.
        sliding_window: each token sees itself and the `sliding_window - 1` tokens before it; None means all.
    """
    if num_heads % arena.layout.num_kv_heads:
        raise ValueError(f"num_heads {num_heads} is not a multiple of {arena.layout.num_kv_heads} KV heads")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, got {sliding_window}")
    if name == "auto":
        name = "torch" if arena.is_host else "cupy"
    if name == "reference":
        from paged_kv.backends.reference_backend import ReferenceBackend

        return ReferenceBackend(arena, num_heads=num_heads, scale=scale, sliding_window=sliding_window)
    if name == "torch":
        from paged_kv.backends.torch_backend import TorchBackend

        return TorchBackend(arena, num_heads=num_heads, scale=scale, sliding_window=sliding_window)
    if name == "cupy":
        from paged_kv.backends.cupy_backend import CupyBackend

        return CupyBackend(arena, num_heads=num_heads, scale=scale, sliding_window=sliding_window)
    known = ", ".join(BACKEND_NAMES)
    raise ValueError(f"unknown attention backend {name!r}: choose auto or one of {known}")
