"""The arena: one allocation, shared with torch without copies."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from paged_kv.arena import HOST_ALIGNMENT_BYTES, KVArena, free_memory_bytes
from paged_kv.backends.attention import AttentionBatch, make_backend
from paged_kv.layout import KVDtype, KVLayout

LAYOUT = KVLayout(
    num_layers=2, num_blocks=3, block_size=4, num_kv_heads=1, head_dim=8, dtype=KVDtype.BFLOAT16
)


def test_torch_and_numpy_see_the_same_bytes() -> None:
    """A write through either view shows in the other; the arena is exactly its layout, zeroed, on a page."""
    arena = KVArena.allocate(LAYOUT)
    tensor = arena.tensor()
    assert len(arena.storage) == LAYOUT.total_bytes
    assert tensor.data_ptr() == arena.storage.ctypes.data
    assert tensor.data_ptr() % HOST_ALIGNMENT_BYTES == 0
    assert not tensor.any()
    tensor.view(torch.bfloat16)[5] = 1.0
    assert arena.storage[10:12].tolist() == [0x80, 0x3F]
    arena.host_view()[2, 0] = 7
    assert tensor[2 * LAYOUT.block_bytes] == 7


def test_a_tensor_keeps_the_memory_alive() -> None:
    """The view may outlive the arena object."""
    tensor = KVArena.allocate(LAYOUT).tensor()
    tensor.fill_(9)
    np.zeros(LAYOUT.total_bytes, np.uint8)
    assert (tensor == 9).all()


def test_an_unknown_device_is_refused() -> None:
    """Only cpu and cuda:N exist."""
    with pytest.raises(ValueError, match="tpu"):
        KVArena.allocate(LAYOUT, "tpu")


def test_free_memory_is_within_the_machine() -> None:
    """Some memory is free, and not more than there is."""
    assert 0 < free_memory_bytes() < 1 << 50


def test_backends_and_batches_refuse_what_does_not_fit_together() -> None:
    """Unknown names, heads that share no group, windows of nothing, tables that are too short."""
    arena = KVArena.allocate(LAYOUT)
    with pytest.raises(ValueError, match="choose auto or one of reference, torch"):
        make_backend("tensor", arena, num_heads=1, scale=1.0)
    with pytest.raises(ValueError, match="sliding_window"):
        make_backend("torch", arena, num_heads=1, scale=1.0, sliding_window=0)
    two_heads = KVArena.allocate(
        KVLayout(num_layers=1, num_blocks=1, block_size=4, num_kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)
    )
    with pytest.raises(ValueError, match="not a multiple"):
        make_backend("torch", two_heads, num_heads=3, scale=1.0)
    for query, context, table in ((1, 5, [0]), (0, 1, [0]), (3, 2, [0])):
        with pytest.raises(ValueError, match="sequence 0"):
            AttentionBatch.build(
                query_lens=[query], context_lens=[context], block_tables=[table], block_size=4
            )
    with pytest.raises(ValueError, match="differ in length"):
        AttentionBatch.build(query_lens=[1], context_lens=[1], block_tables=[], block_size=4)


def test_the_torch_backend_runs_without_cupy() -> None:
    """Serving on a CPU imports neither CuPy nor anything of the kernels."""
    code = """
import sys, torch
from paged_kv.backends.attention import make_backend, AttentionBatch
from paged_kv.layout import KVDtype, KVLayout
from paged_kv.arena import KVArena
layout = KVLayout(
    num_layers=1, num_blocks=1, block_size=4, num_kv_heads=1, head_dim=8, dtype=KVDtype.FP8_E4M3
)
backend = make_backend("torch", KVArena.allocate(layout), num_heads=1, scale=1.0)
rows = torch.ones(2, 1, 8)
batch = AttentionBatch.build(query_lens=[2], context_lens=[2], block_tables=[[0]], block_size=4)
backend.write_kv(0, rows, rows, batch)
assert torch.allclose(backend.attend(0, rows, rows, rows, batch), rows, rtol=2**-10)  # fp16 scale
assert not {"cupy", "paged_kv.kernels.device"} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": "cuda", "PATH": "/usr/bin:/bin"}
    )


def test_importing_the_package_needs_no_torch() -> None:
    """Layout, batch, memory and the interface are numpy only."""
    code = """
import sys
import paged_kv.backends.attention, paged_kv.arena, paged_kv.guards, paged_kv.transfers
assert not {"torch", "cupy"} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": "cuda", "PATH": "/usr/bin:/bin"}
    )
