"""One small run of every kernel with everything that has ever gone wrong in it, compared with the oracle.

The tests that change how kernels are built or scheduled (mutants, warp orders, address sanitiser) run this
and expect it to pass or to fail. Chosen to be awkward: a head size with idle lanes, three heads per group,
ragged contexts that end inside a block, blocks out of order, poisoned memory, split contexts, a window.
"""

import numpy as np
import torch

from paged_kv import reference
from paged_kv.batch import AttentionBatch
from paged_kv.kernels.launcher import Launcher
from paged_kv.kernels.paged_ops import DecodeRows, PagedKernels, SplitPolicy
from paged_kv.layout import KVDtype, KVLayout

LAYER = 1
NUM_HEADS = 6
# 38 blocks, the last one half full: more rows than one step of the decode loop takes.
TABLES = [[*range(40, 3, -1), 2], [3]]
CONTEXTS = [150, 3]
SPARE_BLOCK = 0


class Battery:
    """All kernels over one arena, and the oracle's arena beside it, both poisoned."""

    def __init__(self, launcher: Launcher, dtype: KVDtype, *, num_processors: int, device: str) -> None:
        self.device = device
        self.layout = KVLayout(
            num_layers=2, num_blocks=41, block_size=4, num_kv_heads=2, head_dim=24, dtype=dtype
        )
        # Exactly as large as the layout says, so that a sanitiser sees the first byte behind it.
        self.arena = torch.full((self.layout.total_bytes,), 0xFF, dtype=torch.uint8, device=device)
        self.oracle = np.full(self.layout.total_bytes, 0xFF, np.uint8)
        self.kernels = PagedKernels(
            launcher,
            self.arena,
            self.layout,
            num_heads=NUM_HEADS,
            splits=SplitPolicy(num_processors=num_processors, min_split_tokens=32),
        )
        self.rng = np.random.default_rng(3)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32)).to(self.device)

    def ints(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def write(self, rows: torch.Tensor, slots: np.ndarray) -> None:
        """Write rows as keys and, twice as large, as values, and compare the whole arena."""
        self.kernels.write_kv(LAYER, rows, 2 * rows, torch.from_numpy(slots).to(self.device))
        for is_value, stored in ((False, rows), (True, 2 * rows)):
            reference.write_rows(
                self.oracle,
                self.layout,
                layer=LAYER,
                is_value=is_value,
                rows=stored.cpu().numpy(),
                slots=slots,
            )
        np.testing.assert_array_equal(self.arena.cpu().numpy(), self.oracle)

    def decode(self, sliding_window: int | None) -> None:
        """Attend the last token of each sequence."""
        batch = AttentionBatch.build(
            query_lens=[1, 1], context_lens=CONTEXTS, block_tables=TABLES, block_size=self.layout.block_size
        )
        query = self.random(2, NUM_HEADS, self.layout.head_dim)
        out = torch.full_like(query, torch.nan)
        width = len(TABLES[0]) + 1
        padded = [table + [SPARE_BLOCK] * (width - len(table)) for table in TABLES]
        rows = DecodeRows(
            token_rows=self.ints([0, 1]),
            block_tables=self.ints(padded),
            context_lens=self.ints(CONTEXTS),
            max_context_len=max(CONTEXTS),
        )
        self.kernels.decode(LAYER, query, out, rows, scale=0.3, sliding_window=sliding_window)
        expected = reference.attend(
            self.oracle,
            self.layout,
            batch,
            query.cpu().numpy(),
            layer=LAYER,
            scale=0.3,
            sliding_window=sliding_window,
        )
        np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=2e-5, atol=2e-5)

    def gather(self) -> None:
        """Gather each sequence."""
        for table, context in zip(TABLES, CONTEXTS, strict=True):
            got = self.kernels.gather_kv(LAYER, self.ints(table), context, torch.float32)
            for is_value in (False, True):
                for head in range(self.layout.num_kv_heads):
                    expected = reference.read_rows(
                        self.oracle,
                        self.layout,
                        layer=LAYER,
                        is_value=is_value,
                        head=head,
                        block_table=table,
                        start=0,
                        stop=context,
                    )
                    np.testing.assert_array_equal(got[int(is_value), head].cpu().numpy(), expected)

    def move(self) -> None:
        """Copy two blocks at once and sum all blocks."""
        block_bytes = self.layout.block_bytes
        targets, sources = (
            torch.tensor(ids, device=self.device) * block_bytes for ids in ([SPARE_BLOCK, 1], [7, 9])
        )
        self.kernels.copy_ranges(self.arena, self.arena, targets, sources, block_bytes)
        blocks = self.oracle.reshape(self.layout.num_blocks, -1)
        blocks[[SPARE_BLOCK, 1]] = blocks[[7, 9]]
        np.testing.assert_array_equal(self.arena.cpu().numpy(), self.oracle)
        sums = self.kernels.checksums(torch.arange(self.layout.num_blocks, device=self.device))
        assert [value % (1 << 64) for value in sums.tolist()] == [
            reference.checksum(block) for block in blocks
        ]


def run_battery(launcher: Launcher, dtype: KVDtype = KVDtype.INT8, device: str = "cpu") -> None:
    """Run every kernel; raise AssertionError where one differs from the oracle."""
    for num_processors in (1, 8):  # whole contexts, then splits
        battery = Battery(launcher, dtype, num_processors=num_processors, device=device)
        batch = AttentionBatch.build(
            query_lens=CONTEXTS,
            context_lens=CONTEXTS,
            block_tables=TABLES,
            block_size=battery.layout.block_size,
        )
        rows = battery.random(batch.num_tokens, battery.layout.num_kv_heads, battery.layout.head_dim)
        battery.write(rows, batch.slot_mapping)
        battery.decode(None)
        battery.decode(6)
        battery.gather()
        battery.move()
    if dtype in (KVDtype.INT8, KVDtype.FP8_E4M3):
        rows[0, 0, 3], rows[1, 0, 23], rows[2, 1], rows[3, 1, 0] = torch.inf, torch.nan, 0, 1e30
        battery.write(rows[:4], np.array([4, 5, 6, 2]))
