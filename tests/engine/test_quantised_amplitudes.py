"""Quantised KV of any amplitude: what prefill wrote, decode reads with the scales stored beside it."""

from __future__ import annotations

import pytest
import torch

from paged_kv.arena import KVArena
from paged_kv.backends.attention import AttentionBackend, make_backend
from paged_kv.batch import AttentionBatch
from paged_kv.layout import KVDtype, KVLayout

NUM_TOKENS, NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 2, 32, 4
TABLE = [5, 1, 7, 0, 2, 6, 3, 4]


def backend_over(dtype: KVDtype) -> AttentionBackend:
    layout = KVLayout(
        num_layers=1,
        num_blocks=len(TABLE),
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
    )
    arena = KVArena.allocate(layout, "cpu")
    return make_backend("torch", arena, num_heads=NUM_HEADS, scale=HEAD_DIM**-0.5, sliding_window=None)


def decode_over(dtype: KVDtype, key: torch.Tensor, value: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Store all but the last token as a prompt, the last as a decode; return the last one's attention."""
    backend = backend_over(dtype)
    for start, end in ((0, NUM_TOKENS - 1), (NUM_TOKENS - 1, NUM_TOKENS)):
        batch = AttentionBatch.build(
            query_lens=[end - start], context_lens=[end], block_tables=[TABLE], block_size=BLOCK_SIZE
        )
        backend.write_kv(0, key[start:end], value[start:end], batch)
        attended = backend.attend(0, query[start:end], key[start:end], value[start:end], batch)
    return attended


@pytest.mark.parametrize(
    ("dtype", "outlier", "max_error"),  # root mean square over the attention's own size, measured and a fifth
    [
        (KVDtype.FP8_E4M3, 1.0, 0.045),
        (KVDtype.FP8_E4M3, 20.0, 0.045),
        (KVDtype.INT8, 1.0, 0.0085),
        (KVDtype.INT8, 20.0, 0.05),  # equal steps for all channels: the others lose what the outlier takes
    ],
)
@pytest.mark.parametrize("amplitude", [1e-3, 1.0, 100.0, 500.0])
def test_attention_is_close_at_every_amplitude(
    dtype: KVDtype, outlier: float, max_error: float, amplitude: float
) -> None:
    """Tiny, large, and beyond fp8's own range, also with one channel far above the others: within the
    bound of unquantised KV. A scale of 1, or another block's, would be off by orders of magnitude."""
    generator = torch.Generator().manual_seed(int(amplitude * 1000) + int(outlier))
    key, value, query = (torch.randn(NUM_TOKENS, NUM_HEADS, HEAD_DIM, generator=generator) for _ in range(3))
    key, value = key * amplitude, value * amplitude
    key[..., 3] *= outlier
    query = query / amplitude  # scores of ordinary size
    query[..., 3] /= outlier
    expected = decode_over(KVDtype.FLOAT32, key, value, query)
    actual = decode_over(dtype, key, value, query)
    error = (actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error <= max_error
