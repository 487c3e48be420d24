"""What can be proven of the FlashInfer adapter without it: its view of the arena and its page table."""

import numpy as np
import pytest
import torch

from paged_kv import flashinfer_backend, reference
from paged_kv.arena import KVArena
from paged_kv.backends.attention import AttentionBatch, automatic_backend, make_backend
from paged_kv.flashinfer_backend import layer_pages, page_table
from paged_kv.layout import KVDtype, KVLayout


def layout_of(dtype: KVDtype = KVDtype.BFLOAT16, head_dim: int = 64) -> KVLayout:
    return KVLayout(num_layers=3, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype", [KVDtype.BFLOAT16, KVDtype.FLOAT16])
def test_pages_are_the_arena_itself(dtype: KVDtype) -> None:
    """Each value of each page is the oracle's, and nothing was copied."""
    layout = layout_of(dtype)
    arena = KVArena.allocate(layout)
    rng = np.random.default_rng(0)
    for layer in range(layout.num_layers):
        for is_value in (False, True):
            reference.write_rows(
                arena.storage,
                layout,
                layer=layer,
                is_value=is_value,
                rows=rng.standard_normal((layout.num_slots, 2, 64)).astype(np.float32),
                slots=np.arange(layout.num_slots),
            )
    for layer in range(layout.num_layers):
        for half, pages in enumerate(layer_pages(arena.tensor(), layout, layer)):
            assert pages.shape == (5, 2, 4, 64)
            assert (
                arena.storage.ctypes.data <= pages.data_ptr() < arena.storage.ctypes.data + layout.block_bytes
            )
            for head in range(2):
                expected = reference.read_rows(
                    arena.storage,
                    layout,
                    layer=layer,
                    is_value=bool(half),
                    head=head,
                    block_table=list(range(5)),
                    start=0,
                    stop=layout.num_slots,
                )
                np.testing.assert_array_equal(pages[:, head].reshape(-1, 64).float().numpy(), expected)


def test_the_page_table_names_used_and_visible_blocks_only() -> None:
    """Spare blocks and blocks before the window are left out; a full last block counts block_size."""
    batch = AttentionBatch.build(
        query_lens=[3, 1, 1],
        context_lens=[8, 9, 1],
        block_tables=[[4, 2, 9], [1, 7, 3], [5]],
        block_size=4,
    )
    pages = page_table(batch, None)
    assert (pages.block_ids, pages.starts, pages.last_lens) == ([4, 2, 1, 7, 3, 5], [0, 2, 5, 6], [4, 1, 1])
    pages = page_table(batch, 2)
    assert (pages.block_ids, pages.starts, pages.last_lens) == ([2, 7, 3, 5], [0, 1, 3, 4], [4, 1, 1])


@pytest.mark.parametrize(
    ("layout", "device", "reason"),
    [
        (layout_of(), "cpu", "needs a CUDA device"),
        (layout_of(KVDtype.FP8_E4M3), "cuda:0", "not fp8_e4m3"),
        (layout_of(KVDtype.FLOAT32), "cuda:0", "not fp32"),
        (layout_of(head_dim=80), "cuda:0", "not 80"),
        (layout_of(), "cuda:0", None),
    ],
)
def test_what_it_cannot_serve_is_named(
    layout: KVLayout, device: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every arena that FlashInfer cannot view or compute is refused with the reason, before an import."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flashinfer")
    found = flashinfer_backend.obstacle(layout, device)
    assert found is None if reason is None else reason in str(found)


def test_without_flashinfer_the_error_says_what_to_install() -> None:
    """Asking for it by name on a machine without it is one clear error; `auto` is torch on a CPU."""
    arena = KVArena.allocate(layout_of())
    assert automatic_backend(arena) == "torch"
    with pytest.raises(ValueError, match=r"FlashInfer (is not installed: pip|needs a CUDA device)"):
        make_backend("flashinfer", arena, num_heads=2, scale=1.0)
    assert make_backend("auto", arena, num_heads=2, scale=1.0).__class__.__name__ == "TorchBackend"
    assert torch.equal(arena.tensor(), torch.zeros(arena.layout.total_bytes, dtype=torch.uint8))
