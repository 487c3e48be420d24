"""The byte layout of the arena and how much of it fits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.layout import KVDtype, KVLayout, parse_kv_memory


def shapes() -> st.SearchStrategy[KVLayout]:
    return st.builds(
        KVLayout,
        num_layers=st.integers(1, 5),
        num_blocks=st.integers(1, 6),
        block_size=st.sampled_from([4, 8, 16, 32]),
        num_kv_heads=st.integers(1, 4),
        head_dim=st.sampled_from([8, 64, 80, 128]),
        dtype=st.sampled_from(KVDtype),
    )


def test_a_known_model() -> None:
    """Llama 8B: 128 KiB a token in bf16, 2 MiB a block; in fp8 with scales 65 KiB a token."""
    layout = KVLayout(
        num_layers=32, num_blocks=1, block_size=16, num_kv_heads=8, head_dim=128, dtype=KVDtype.BFLOAT16
    )
    assert layout.bytes_per_token == 128 << 10
    assert layout.block_bytes == 2 << 20
    fp8 = KVLayout(
        num_layers=32, num_blocks=1, block_size=16, num_kv_heads=8, head_dim=128, dtype=KVDtype.FP8_E4M3
    )
    assert fp8.bytes_per_token == 2 * 32 * 8 * (128 + 2)


def test_fp8_holds_nearly_twice_the_tokens() -> None:
    """In the shape of SmolLM2, with heads as small as they get, scales included: 1.94 times bf16."""
    smollm2 = KVLayout(
        num_layers=30, num_blocks=1, block_size=16, num_kv_heads=3, head_dim=64, dtype=KVDtype.BFLOAT16
    )
    assert smollm2.bytes_per_token / replace(smollm2, dtype=KVDtype.FP8_E4M3).bytes_per_token >= 1.93


@given(layout=shapes())
def test_tiles_fill_the_arena_exactly_once(layout: KVLayout) -> None:
    """Every (block, layer, K or V, head) has its own tile, and together they are the arena."""
    tiles = [
        layout.tile_id(block_id=block_id, layer=layer, is_value=is_value, head=head)
        for block_id in range(layout.num_blocks)
        for layer in range(layout.num_layers)
        for is_value in (False, True)
        for head in range(layout.num_kv_heads)
    ]
    assert tiles == list(range(layout.num_tiles))
    assert layout.num_tiles * layout.tile_bytes == layout.total_bytes
    assert layout.layer_bytes * layout.num_layers == layout.block_bytes
    assert layout.bytes_per_token * layout.num_slots == layout.total_bytes
    assert layout.tile_bytes % 16 == 0


@given(layout=shapes(), memory_bytes=st.integers(0, 1 << 24))
def test_fit_is_the_largest_number_of_blocks(layout: KVLayout, memory_bytes: int) -> None:
    """As many blocks as fit, not one more; too little memory is an error that says how much one takes."""

    def fit() -> int:
        return KVLayout.fit(
            memory_bytes,
            num_layers=layout.num_layers,
            block_size=layout.block_size,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
        )

    if memory_bytes < layout.block_bytes:
        with pytest.raises(ValueError, match=f"a KV block of {layout.block_bytes} bytes"):
            fit()
    else:
        assert fit() * layout.block_bytes <= memory_bytes < (fit() + 1) * layout.block_bytes


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("0.9", 900),
        ("1", 1000),
        ("1.0", 1000),
        ("2", 2),
        ("4096", 4096),
        ("500MB", 500_000_000),
        ("8GiB", 8 << 30),
        (" 1.5 gi ", 3 << 29),
        ("64k", 64_000),
    ],
)
def test_kv_memory_is_a_share_or_a_size(setting: str, expected: int) -> None:
    """Up to 1 it is a share of the free memory, above it bytes, with or without a unit."""
    assert parse_kv_memory(setting, free_bytes=1000) == expected


@pytest.mark.parametrize("setting", ["", "most", "-1", "0", "0.0", "8 apples", "1e9"])
def test_a_meaningless_kv_memory_is_refused(setting: str) -> None:
    """The message repeats the setting."""
    with pytest.raises(ValueError, match="--kv-memory"):
        parse_kv_memory(setting, free_bytes=1000)


@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 8), (2, 10), (0, 64), (16, 0)])
def test_a_shape_that_kernels_cannot_address_is_refused(block_size: int, head_dim: int) -> None:
    """Tiles off the 16-byte grid and empty dimensions raise before anything is allocated."""
    with pytest.raises(ValueError):
        KVLayout(
            num_layers=1,
            num_blocks=1,
            block_size=block_size,
            num_kv_heads=1,
            head_dim=head_dim,
            dtype=KVDtype.INT8,
        )
