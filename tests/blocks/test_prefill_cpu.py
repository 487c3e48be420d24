"""What the compiled prefill promises beyond the contract of every backend (test_attention_contract)."""

import numpy as np
import pytest
import torch

from paged_kv.arena import KVArena
from paged_kv.backends.attention import AttentionBatch, make_backend
from paged_kv.cpu.native import is_supported
from paged_kv.layout import KVDtype, KVLayout


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("block_size", [4, 16, 24])
def test_the_compiled_prefill_gives_a_row_the_same_bits_in_any_chunk(
    block_size: int, window: int | None
) -> None:
    """On one thread a prompt's attention is equal to the last bit in one piece and in several."""
    if not is_supported():
        pytest.skip("this processor does not run the compiled kernels")
    num_tokens, chunks = 61, (2, 27, 32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layout = KVLayout(
            num_layers=1,
            num_blocks=16,
            block_size=block_size,
            num_kv_heads=2,
            head_dim=32,
            dtype=KVDtype.FLOAT32,
        )
        arena = KVArena.allocate(layout, "cpu")
        backend = make_backend("torch", arena, num_heads=6, scale=0.2, sliding_window=window)
        rows = torch.randn(num_tokens, 10, 32, generator=torch.Generator().manual_seed(5))
        query, key, value = rows[:, :6], rows[:, 6:8], rows[:, 8:]

        def attend(start: int, stop: int) -> torch.Tensor:
            batch = AttentionBatch.build(
                query_lens=[stop - start],
                context_lens=[stop],
                block_tables=[list(range(16))],
                block_size=block_size,
            )
            backend.write_kv(0, key[start:stop], value[start:stop], batch)
            return backend.attend(0, query[start:stop], key[start:stop], value[start:stop], batch)

        ends = np.cumsum(chunks).tolist()
        pieces = [attend(stop - size, stop) for size, stop in zip(chunks, ends, strict=True)]
        assert torch.equal(torch.cat(pieces), attend(0, num_tokens))
    finally:
        torch.set_num_threads(threads)
