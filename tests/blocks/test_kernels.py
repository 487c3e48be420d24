"""What the contract suite does not cover: splits, every fp8 code, strides, memory errors."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from blocks.kernel_battery import run_battery
from hypothesis import given
from hypothesis import strategies as st
from kernel_tools.host import HostLauncher, make_backend_anywhere, missing_tool

from paged_kv import codec, reference
from paged_kv.arena import KVArena
from paged_kv.backends.attention import AttentionBackend
from paged_kv.backends.cupy_backend import CupyBackend
from paged_kv.backends.torch_backend import quantise_rows
from paged_kv.batch import AttentionBatch
from paged_kv.kernels.paged_ops import PagedKernels, SplitPolicy
from paged_kv.kernels.source import heads_per_block
from paged_kv.layout import KVDtype, KVLayout

needs_host_kernels = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))
TESTS = Path(__file__).parents[1]


@needs_host_kernels
@pytest.mark.parametrize("dtype", [KVDtype.FP8_E4M3, KVDtype.BFLOAT16])
def test_the_battery_passes_with_vendor_conversions(dtype: KVDtype) -> None:
    """The types that NVIDIA's headers convert pass the battery that the mutants fail."""
    run_battery(HostLauncher(), dtype)


@needs_host_kernels
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("num_processors", [1, 2, 7, 64])
def test_splitting_a_context_does_not_change_the_result(num_processors: int, window: int | None) -> None:
    """One block per context, or many, some of them empty: attention stays the oracle's."""
    layout = KVLayout(
        num_layers=1, num_blocks=80, block_size=4, num_kv_heads=1, head_dim=16, dtype=KVDtype.FLOAT32
    )
    arena = KVArena.allocate(layout)
    backend = CupyBackend(
        arena,
        num_heads=2,
        scale=0.25,
        sliding_window=window,
        splits=SplitPolicy(num_processors=num_processors, min_split_tokens=8),
        launcher=HostLauncher(),
    )
    rng = np.random.default_rng(0)
    tables = [list(range(70)), [71], [72, 73, 74]]
    contexts = [278, 1, 9]

    def random(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    whole = AttentionBatch.build(
        query_lens=contexts, context_lens=contexts, block_tables=tables, block_size=4
    )
    backend.write_kv(0, random(288, 1, 16), random(288, 1, 16), whole)
    last = AttentionBatch.build(
        query_lens=[1, 1, 3], context_lens=contexts, block_tables=tables, block_size=4
    )
    query = random(5, 2, 16)
    got = backend.attend(0, query, random(5, 1, 16), random(5, 1, 16), last)
    expected = reference.attend(
        arena.host_view().reshape(-1), layout, last, query.numpy(), layer=0, scale=0.25, sliding_window=window
    )
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


@given(
    num_processors=st.integers(1, 200),
    num_blocks=st.integers(1, 4096),
    max_context_len=st.integers(1, 1 << 20),
)
def test_splits_are_few_enough_to_be_worth_it(
    num_processors: int, num_blocks: int, max_context_len: int
) -> None:
    """A split has at least the least useful length, and a full device is never split further."""
    policy = SplitPolicy(num_processors=num_processors)
    num_splits = policy.num_splits(num_blocks=num_blocks, max_context_len=max_context_len)
    assert 1 <= num_splits <= policy.max_splits
    assert num_splits == 1 or max_context_len // num_splits >= policy.min_split_tokens
    if num_blocks >= num_processors * policy.blocks_per_processor:
        assert num_splits == 1


@given(num_kv_heads=st.integers(1, 16), group=st.integers(1, 32))
def test_a_thread_block_never_straddles_two_groups(num_kv_heads: int, group: int) -> None:
    """Heads per block divide the group, so that one block reads one KV head."""
    assert group % heads_per_block(num_kv_heads * group, num_kv_heads) == 0


@needs_host_kernels
def test_every_bf16_value_is_quantised_alike_by_kernel_torch_and_numpy() -> None:
    """All 65,536 bf16 inputs up to 448 in magnitude give the same fp8 code from all three (scale is 1)."""
    values = codec.decode_bf16(np.arange(1 << 16, dtype=np.uint32).astype(np.uint16))
    values = np.where(np.abs(values) <= 448, values, np.float32(0))  # NaN compares false
    rows = np.concatenate([values, np.zeros(-len(values) % 15, np.float32)]).reshape(-1, 1, 15)
    rows = np.concatenate([rows, np.full((len(rows), 1, 1), 448, np.float32)], axis=2)
    layout = KVLayout(
        num_layers=1,
        num_blocks=-(-len(rows) // 16),
        block_size=16,
        num_kv_heads=1,
        head_dim=16,
        dtype=KVDtype.FP8_E4M3,
    )
    arena = KVArena.allocate(layout)
    kernels = PagedKernels(
        HostLauncher(), arena.tensor(), layout, num_heads=1, splits=SplitPolicy(num_processors=1)
    )
    tensor = torch.from_numpy(rows).to(torch.bfloat16)
    kernels.write_kv(0, tensor, tensor, torch.arange(len(rows)))
    tiles = arena.storage.reshape(-1, 2, layout.tile_bytes)[:, 0, : layout.tile_data_bytes]
    from_kernel = tiles.reshape(-1, 16)[: len(rows)]
    from_torch, scales = quantise_rows(tensor, KVDtype.FP8_E4M3)
    assert (scales == 256).all()
    np.testing.assert_array_equal(from_kernel, from_torch[:, 0].numpy())
    np.testing.assert_array_equal(from_kernel, codec.encode_rows(rows, KVDtype.FP8_E4M3)[0][:, 0])


@needs_host_kernels
def test_keys_cut_out_of_a_fused_projection_are_read_in_place() -> None:
    """Rows a stride apart, or not 16-byte aligned, are stored as if they were packed."""
    layout = KVLayout(
        num_layers=1, num_blocks=4, block_size=4, num_kv_heads=2, head_dim=24, dtype=KVDtype.INT8
    )
    batch = AttentionBatch.build(query_lens=[7], context_lens=[7], block_tables=[[2, 1]], block_size=4)
    fused = torch.from_numpy(np.random.default_rng(0).standard_normal((7, 7 * 24 + 3)).astype(np.float32))
    stored = []

    def on_host(arena: KVArena) -> AttentionBackend:
        return make_backend_anywhere("cupy", arena, num_heads=6, scale=1.0)

    for start in (48, 1):  # strided only; strided and misaligned
        arena = KVArena.allocate(layout)
        backend = on_host(arena)
        key = fused[:, start : start + 48].view(7, 2, 24)
        backend.write_kv(0, key, key, batch)
        packed = KVArena.allocate(layout)
        on_host(packed).write_kv(0, key.contiguous(), key.contiguous(), batch)
        np.testing.assert_array_equal(arena.storage, packed.storage)
        stored.append(arena.storage.copy())
    assert (stored[0] != stored[1]).any()


SANITISED = """
from blocks.kernel_battery import run_battery
from blocks.test_kernels_mutants import Mutant, MutantLauncher
from kernel_tools.host import HostLauncher
options = ("-fsanitize=address", "-g")
run_battery(HostLauncher(extra_options=options))
print("passed", flush=True)
fault = Mutant(name="", file="checksum.cu", correct="block_bytes / 8", wrong="block_bytes / 8 + 2")
run_battery(MutantLauncher(fault, seed=1, extra_options=options))
"""


@needs_host_kernels
@pytest.mark.timeout(300)  # torch alone takes long to import under the sanitiser
def test_no_kernel_touches_memory_beside_its_arrays() -> None:
    """Under the address sanitiser the battery passes, and a planted read behind the arena is reported."""
    find = ["g++", "-print-file-name=libasan.so"]
    environment = os.environ | {
        "LD_PRELOAD": subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONPATH": f"{TESTS}:{TESTS.parent / 'cuda'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", SANITISED],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=280,
    )
    assert "passed" in done.stdout, done.stderr[-3000:]
    assert "heap-buffer-overflow" in done.stderr
    assert "checksum.cu" in done.stderr
