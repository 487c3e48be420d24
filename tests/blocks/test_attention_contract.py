"""The contract of every attention backend, run against each of them on the same cases.

By default on the CPU, where `cupy` runs its kernels on the CPU too; `PAGED_KV_DEVICE=cuda:0` runs the same
cases on a GPU (see tests/gpu).
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kernel_tools.host import make_backend_anywhere

from paged_kv import reference
from paged_kv.arena import KVArena
from paged_kv.backends.attention import AttentionBackend, AttentionBatch
from paged_kv.layout import KVDtype, KVLayout

DEVICE = os.environ.get("PAGED_KV_DEVICE", "cpu")
BACKENDS = ("reference", "torch", "torch on one thread", "cupy") if DEVICE == "cpu" else ("torch", "cupy")
# A GPU sums in another order and rounds exponentials differently.
FLOAT32_TOLERANCE = 2e-5 if DEVICE == "cpu" else 2e-4
NUM_LAYERS = 2


@dataclass(kw_only=True)
class Bench:
    """One backend over its arena, and the oracle's arena beside it."""

    backend: AttentionBackend
    arena: KVArena
    oracle: np.ndarray
    layout: KVLayout
    num_heads: int
    sliding_window: int | None
    rng: np.random.Generator

    @property
    def scale(self) -> float:
        return self.layout.head_dim**-0.5

    def random(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32)).to(DEVICE)

    def step(self, batch: AttentionBatch, dtype: torch.dtype = torch.float32) -> None:
        """Write random keys and values in every layer, then compare bytes and attention with the oracle."""
        for layer in range(NUM_LAYERS):
            shape = (batch.num_tokens, self.layout.num_kv_heads, self.layout.head_dim)
            key, value = (self.random(*shape).to(dtype) for _ in range(2))
            query = self.random(batch.num_tokens, self.num_heads, self.layout.head_dim).to(dtype)
            self.write(layer, key, value, batch)
            got = self.backend.attend(layer, query, key, value, batch)
            assert got.dtype == dtype
            tolerance = FLOAT32_TOLERANCE if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(
                got.float().cpu(), self.expected(layer, query, batch), rtol=tolerance, atol=tolerance
            )
        self.assert_same_bytes()

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> None:
        self.backend.write_kv(layer, key, value, batch)
        for is_value, rows in ((False, key), (True, value)):
            reference.write_rows(
                self.oracle,
                self.layout,
                layer=layer,
                is_value=is_value,
                rows=rows.float().cpu().numpy(),
                slots=batch.slot_mapping,
            )

    def expected(self, layer: int, query: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        out = reference.attend(
            self.oracle,
            self.layout,
            batch,
            query.float().cpu().numpy(),
            layer=layer,
            scale=self.scale,
            sliding_window=self.sliding_window,
        )
        return torch.from_numpy(out)

    def assert_same_bytes(self) -> None:
        oracle = self.oracle.reshape(self.layout.num_blocks, -1)
        for block_id in range(self.layout.num_blocks):
            assert self.backend.read_block(block_id) == oracle[block_id].tobytes(), (
                f"block {block_id} differs"
            )

    def poison(self) -> None:
        """Fill every byte of both arenas with a NaN pattern: 0xFF is NaN in every float type we store."""
        for block_id in range(self.layout.num_blocks):
            self.backend.write_block(block_id, b"\xff" * self.layout.block_bytes)
        self.oracle[:] = 0xFF


MakeBench = Callable[..., Bench]


@pytest.fixture(params=BACKENDS)
def make_bench(request: pytest.FixtureRequest) -> Iterator[MakeBench]:
    """Return a factory of benches for one backend; on one thread the compiled decode takes part."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "torch on one thread" else 2)
    name = request.param.split()[0]

    def make(
        *,
        dtype: KVDtype = KVDtype.FLOAT32,
        num_blocks: int = 24,
        block_size: int = 4,
        num_kv_heads: int = 2,
        num_heads: int = 4,
        head_dim: int = 16,
        sliding_window: int | None = None,
        seed: int = 0,
    ) -> Bench:
        layout = KVLayout(
            num_layers=NUM_LAYERS,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        )
        arena = KVArena.allocate(layout, DEVICE)
        backend = make_backend_anywhere(
            name, arena, num_heads=num_heads, scale=head_dim**-0.5, sliding_window=sliding_window
        )
        return Bench(
            backend=backend,
            arena=arena,
            oracle=np.zeros(layout.total_bytes, np.uint8),
            layout=layout,
            num_heads=num_heads,
            sliding_window=sliding_window,
            rng=np.random.default_rng(seed),
        )

    yield make
    torch.set_num_threads(num_threads)


def batch_of(bench: Bench, *sequences: tuple[int, int, list[int]]) -> AttentionBatch:
    """Build a batch from (new tokens, context, block table) triples."""
    queries, contexts, tables = zip(*sequences, strict=True)
    return AttentionBatch.build(
        query_lens=queries, context_lens=contexts, block_tables=tables, block_size=bench.layout.block_size
    )


@pytest.mark.parametrize("dtype", KVDtype)
def test_mixed_steps_match_the_oracle(make_bench: MakeBench, dtype: KVDtype) -> None:
    """Prefills, chunks and decodes of unequal lengths in one step give the oracle's bytes and attention."""
    bench = make_bench(dtype=dtype)
    bench.step(batch_of(bench, (7, 7, [5, 1]), (12, 12, [9, 2, 7]), (1, 1, [0])))
    bench.step(batch_of(bench, (1, 8, [5, 1]), (6, 18, [9, 2, 7, 20, 11]), (1, 2, [0])))
    bench.step(batch_of(bench, (1, 19, [9, 2, 7, 20, 11]), (1, 9, [5, 1, 23]), (4, 4, [3]), (1, 3, [0])))
    bench.step(batch_of(bench, (1, 20, [9, 2, 7, 20, 11])))


@pytest.mark.parametrize("dtype", KVDtype)
def test_garbage_outside_the_context_never_reaches_a_result(make_bench: MakeBench, dtype: KVDtype) -> None:
    """Slots behind a sequence's end, spare blocks and padding may hold NaN: results stay the oracle's."""
    bench = make_bench(dtype=dtype)
    bench.poison()
    bench.step(batch_of(bench, (5, 5, [3, 8]), (9, 9, [1, 2, 4, 17])))
    bench.step(batch_of(bench, (1, 6, [3, 8, 19]), (1, 10, [1, 2, 4, 17]), (3, 3, [12, 13])))
    bench.step(batch_of(bench, (1, 7, [3, 8, 19]), (2, 12, [1, 2, 4, 17])))


@pytest.mark.parametrize("window", [1, 3, 4, 9])
def test_a_sliding_window_hides_older_tokens(make_bench: MakeBench, window: int) -> None:
    """Each token sees itself and window - 1 before it, in prefill, chunk and decode, across block borders."""
    bench = make_bench(sliding_window=window)
    bench.step(batch_of(bench, (11, 11, [4, 6, 2]), (2, 2, [1])))
    bench.step(batch_of(bench, (5, 16, [4, 6, 2, 9]), (1, 3, [1])))
    bench.step(batch_of(bench, (1, 17, [4, 6, 2, 9, 15]), (1, 4, [1])))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1), (9, 3)])
def test_every_grouping_of_heads(make_bench: MakeBench, num_heads: int, num_kv_heads: int) -> None:
    """Query heads read the KV head of their group, from no sharing to one head for all."""
    bench = make_bench(num_heads=num_heads, num_kv_heads=num_kv_heads)
    bench.step(batch_of(bench, (6, 6, [7, 3])))
    bench.step(batch_of(bench, (1, 7, [7, 3]), (5, 5, [0, 1])))


@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (16, 128), (8, 80), (4, 256)])
def test_model_shapes(make_bench: MakeBench, block_size: int, head_dim: int) -> None:
    """Block sizes and head sizes of real models, full blocks and nearly empty ones."""
    bench = make_bench(block_size=block_size, head_dim=head_dim, num_blocks=6, num_heads=2, num_kv_heads=1)
    bench.step(batch_of(bench, (block_size, block_size, [5]), (3, 3, [2])))
    bench.step(batch_of(bench, (1, block_size + 1, [5, 0]), (1, 4, [2])))


def test_long_contexts(make_bench: MakeBench) -> None:
    """Contexts longer than an inner loop takes at once, beside short ones, in decoding and in chunks."""
    bench = make_bench(num_blocks=200)
    tables = [list(range(0, 199, 2)), list(range(1, 200, 2)), [198]]
    lengths = [330, 290, 1]
    whole = batch_of(bench, *zip(lengths, lengths, tables, strict=True))
    shape = (whole.num_tokens, bench.layout.num_kv_heads, bench.layout.head_dim)
    for layer in range(NUM_LAYERS):
        bench.write(layer, bench.random(*shape), bench.random(*shape), whole)
    bench.step(batch_of(bench, (1, 331, tables[0]), (6, 296, tables[1]), (1, 2, tables[2])))


@pytest.mark.parametrize("dtype", [KVDtype.BFLOAT16, KVDtype.FP8_E4M3])
@pytest.mark.parametrize(("head_dim", "window"), [(16, None), (64, None), (64, 5)])
def test_half_precision_queries(
    make_bench: MakeBench, dtype: KVDtype, head_dim: int, window: int | None
) -> None:
    """A bf16 model gets bf16 back, within its rounding, poisoned memory or not, with and without a window."""
    bench = make_bench(dtype=dtype, head_dim=head_dim, sliding_window=window)
    bench.poison()
    bench.step(batch_of(bench, (7, 7, [5, 1]), (1, 1, [0])), torch.bfloat16)
    bench.step(batch_of(bench, (1, 8, [5, 1]), (3, 4, [0])), torch.bfloat16)
    bench.step(batch_of(bench, (1, 9, [5, 1, 7]), (6, 10, [0, 9, 3])), torch.bfloat16)


def test_chunking_does_not_change_the_result(make_bench: MakeBench) -> None:
    """In fp32 each token's attention is the same whole, in chunks, token by token or beside others."""
    table, length = [3, 9, 1, 12, 6], 19
    whole: torch.Tensor | None = None
    for chunks in ([19], [8, 11], [5, 1, 7, 6], [1] * 19):
        bench = make_bench()
        shape = (length, bench.layout.num_kv_heads, bench.layout.head_dim)
        key, value = bench.random(*shape), bench.random(*shape)
        query = bench.random(length, bench.num_heads, bench.layout.head_dim)
        extra = bench.random(1, bench.num_heads, bench.layout.head_dim)
        parts, done = [], 0
        for chunk in chunks:
            rows = slice(done, done + chunk)
            done += chunk
            batch = batch_of(bench, (chunk, done, table), (1, 1, [20]))
            neighbour = extra[:, : bench.layout.num_kv_heads]
            keys, values = torch.cat([key[rows], neighbour]), torch.cat([value[rows], neighbour])
            bench.write(0, keys, values, batch)
            parts.append(
                bench.backend.attend(0, torch.cat([query[rows], extra]), keys, values, batch)[:chunk]
            )
        result = torch.cat(parts)
        whole = result if whole is None else whole
        torch.testing.assert_close(result, whole, rtol=FLOAT32_TOLERANCE / 2, atol=FLOAT32_TOLERANCE / 10)


@pytest.mark.parametrize("dtype", [KVDtype.FP8_E4M3, KVDtype.INT8])
def test_quantised_blocks_stay_finite_and_bounded(make_bench: MakeBench, dtype: KVDtype) -> None:
    """Zeros, tiny, huge, infinite and NaN rows are stored finite, byte for byte as the oracle stores them."""
    bench = make_bench(dtype=dtype, num_kv_heads=1, num_heads=1)
    rows = bench.random(8, 1, bench.layout.head_dim)
    rows[0], rows[1], rows[2] = 0, rows[1] * 1e-30, rows[2].sign() * 3.4e38
    rows[3, 0, 3], rows[4, 0, 5], rows[5, 0, 0], rows[6] = torch.inf, -torch.inf, torch.nan, torch.nan
    rows[7, 0, 1] = -0.0
    batch = batch_of(bench, (8, 8, [1, 2]))
    bench.write(1, rows, rows, batch)
    bench.assert_same_bytes()
    query = bench.random(8, 1, bench.layout.head_dim)
    assert bench.backend.attend(1, query * 1e-20, rows, rows, batch).isfinite().all()


@pytest.mark.parametrize("dtype", KVDtype)
def test_each_stored_value_is_the_nearest(make_bench: MakeBench, dtype: KVDtype) -> None:
    """Values on and beside every rounding border are stored as the oracle stores them."""
    bench = make_bench(dtype=dtype, num_kv_heads=1, num_heads=1, head_dim=32, num_blocks=33, block_size=8)
    codes = np.arange(1 << 13, dtype=np.uint32) << 19  # each bf16 exponent with its upper fraction bits
    values = torch.from_numpy(codes.view(np.float32).copy()).nan_to_num(nan=1.5).reshape(-1, 1, 32)
    values = (values * torch.linspace(0.5, 2.0, 256)[:, None, None]).to(DEVICE)
    batch = batch_of(bench, (256, 256, list(range(1, 33))))
    bench.write(0, values, -values, batch)
    bench.assert_same_bytes()


def test_a_block_travels_as_bytes_and_its_checksum_with_it(make_bench: MakeBench) -> None:
    """Bytes read from one block and written to another are that block; one flipped bit or a swap shows."""
    bench = make_bench(dtype=KVDtype.BFLOAT16)
    bench.step(batch_of(bench, (4, 4, [2])))
    data = bench.backend.read_block(2)
    bench.backend.write_block(11, data)
    assert bench.backend.read_block(11) == data
    assert (
        bench.backend.checksum(11)
        == bench.backend.checksum(2)
        == reference.checksum(np.frombuffer(data, np.uint8))
    )
    flipped = bytearray(data)
    flipped[100] ^= 16
    bench.backend.write_block(11, bytes(flipped))
    assert bench.backend.checksum(11) != bench.backend.checksum(2)
    bench.backend.write_block(11, data[8:16] + data[:8] + data[16:])
    assert bench.backend.checksum(11) != bench.backend.checksum(2)


@pytest.mark.parametrize("dtype", KVDtype)
def test_many_blocks_travel_in_one_call(make_bench: MakeBench, dtype: KVDtype) -> None:
    """Rows read are the blocks asked for, in that order; written elsewhere they are those blocks again."""
    bench = make_bench(dtype=dtype)
    bench.step(batch_of(bench, (20, 20, [7, 2, 9, 0, 23])))
    rows = torch.zeros(3, bench.layout.block_bytes, dtype=torch.uint8)
    bench.backend.read_blocks([23, 7, 2], rows)
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    oracle = bench.oracle.reshape(bench.layout.num_blocks, -1)
    np.testing.assert_array_equal(rows.numpy(), oracle[[23, 7, 2]])
    bench.backend.write_blocks([4, 11, 5], rows)
    oracle[[4, 11, 5]] = rows.numpy()
    bench.assert_same_bytes()
    nothing = torch.zeros(0, bench.layout.block_bytes, dtype=torch.uint8)
    bench.backend.read_blocks([], nothing)
    bench.backend.write_blocks([], nothing)
    bench.assert_same_bytes()


def test_part_of_a_wider_row_can_be_the_place_of_a_block(make_bench: MakeBench) -> None:
    """Rows may be a slice of wider ones, as where a model's layers live in two arenas."""
    bench = make_bench()
    bench.step(batch_of(bench, (8, 8, [3, 6])))
    size = bench.layout.block_bytes
    wide = torch.full((2, size + 32), 7, dtype=torch.uint8)
    bench.backend.read_blocks([6, 3], wide[:, 16 : 16 + size])
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    assert wide[0, 16 : 16 + size].numpy().tobytes() == bench.backend.read_block(6)
    assert set(wide[:, :16].flatten().tolist()) == set(wide[:, -16:].flatten().tolist()) == {7}
    bench.backend.write_blocks([1, 2], wide[:, 16 : 16 + size])
    assert bench.backend.read_block(2) == bench.backend.read_block(3)


def test_a_block_of_the_wrong_size_or_place_is_refused(make_bench: MakeBench) -> None:
    """Truncated bytes and unknown block ids raise and change nothing."""
    bench = make_bench()
    with pytest.raises(ValueError, match="2 blocks are 2 rows"):
        bench.backend.write_blocks([0, 1], torch.zeros(1, bench.layout.block_bytes, dtype=torch.uint8))
    with pytest.raises(IndexError):
        bench.backend.read_blocks([-1], torch.zeros(1, bench.layout.block_bytes, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a block is"):
        bench.backend.write_block(0, b"short")
    with pytest.raises(IndexError):
        bench.backend.read_block(bench.layout.num_blocks)
    bench.assert_same_bytes()
