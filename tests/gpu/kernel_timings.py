"""Each kernel against its floor (bytes moved ÷ measured copy bandwidth) and against torch's SDPA.

Layers are taken in turn, so that what one call reads is not in the cache when it is read again.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu.stopwatch import time_calls
from kernel_tools.host import HostLauncher
from torch.nn.functional import scaled_dot_product_attention

from paged_kv.arena import KVArena
from paged_kv.backends.attention import AttentionBatch
from paged_kv.backends.cupy_backend import CupyBackend
from paged_kv.kernels.paged_ops import PagedKernels
from paged_kv.layout import KVDtype, KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the measurement is: full on a GPU, tiny where only the script itself is tested."""

    batches: tuple[tuple[int, int], ...]  # (sequences, context tokens)
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_prompt_tokens: int
    repetitions: int
    copy_bytes: int


FULL = Scale(
    batches=((1, 8192), (1, 65536), (16, 2048), (64, 4096), (256, 1024)),
    num_layers=8,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_prompt_tokens=8192,
    repetitions=40,
    copy_bytes=2 << 30,
)
TINY = Scale(
    batches=((1, 40), (3, 20)),
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_prompt_tokens=30,
    repetitions=2,
    copy_bytes=1 << 20,
)
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of the table."""

    name: str
    kv_dtype: str
    shape: str
    median_us: float
    p99_us: float
    floor_us: float
    share_of_floor: float  # floor ÷ median: 1 is perfect
    sdpa_us: float | None = None  # torch over contiguous bf16 KV of the same shape


def copy_bandwidth(device: torch.device, scale: Scale) -> float:
    """Return measured bytes per second of a device copy, read and written bytes both counted."""
    source = torch.empty(scale.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_calls(lambda _: target.copy_(source), device, repetitions=20)
    return 2 * scale.copy_bytes / timing.median_s


class Case:
    """One KV type at one batch, over an arena of several layers."""

    def __init__(
        self, dtype: KVDtype, num_sequences: int, context: int, device: torch.device, scale: Scale
    ) -> None:
        blocks = math.ceil(context / BLOCK_SIZE)
        self.scale, self.device, self.num_sequences, self.context = scale, device, num_sequences, context
        self.layout = KVLayout(
            num_layers=scale.num_layers,
            num_blocks=num_sequences * blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=scale.num_kv_heads,
            head_dim=scale.head_dim,
            dtype=dtype,
        )
        self.arena = KVArena.allocate(self.layout, str(device))
        self.backend = CupyBackend(
            self.arena,
            num_heads=scale.num_heads,
            scale=scale.head_dim**-0.5,
            sliding_window=None,
            launcher=HostLauncher() if self.arena.is_host else None,
        )
        order = torch.randperm(self.layout.num_blocks).tolist()
        tables = [order[i * blocks : (i + 1) * blocks] for i in range(num_sequences)]
        self.prompt = self._batch([context] * num_sequences, tables)
        self.step = self._batch([1] * num_sequences, tables)
        self.key = self._random(self.prompt.num_tokens, scale.num_kv_heads)
        for layer in range(scale.num_layers):
            self.backend.write_kv(layer, self.key, self.key, self.prompt)

    def _batch(self, query_lens: list[int], tables: list[list[int]]) -> AttentionBatch:
        return AttentionBatch.build(
            query_lens=query_lens,
            context_lens=[self.context] * self.num_sequences,
            block_tables=tables,
            block_size=BLOCK_SIZE,
        )

    def _random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(
            num_tokens, num_heads, self.scale.head_dim, device=self.device, dtype=torch.bfloat16
        )

    @property
    def kernels(self) -> PagedKernels:
        return self.backend.kernels

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes of all sequences' keys and values in one layer."""
        return self.num_sequences * self.context * self.layout.layer_bytes // BLOCK_SIZE

    def measure(self, bandwidth: float) -> Iterator[Measurement]:
        """Time every kernel on this case."""
        scale, layers = self.scale, self.scale.num_layers
        query = self._random(self.num_sequences, scale.num_heads)
        new = self._random(self.num_sequences, scale.num_kv_heads)
        prompt_bytes = 2 * self.key.numel() * self.key.element_size()
        table = torch.tensor(self.step.block_tables[0], dtype=torch.int32, device=self.device)
        one = self.layer_kv_bytes // self.num_sequences
        out_bytes = 2 * self.context * scale.num_kv_heads * scale.head_dim * 2
        ids = torch.arange(self.layout.num_blocks, device=self.device)
        half = self.layout.num_blocks // 2
        targets, sources = (ids[: 2 * half] * self.layout.block_bytes).chunk(2)
        storage = self.arena.tensor()
        cases: tuple[tuple[str, int, Callable[[int], object]], ...] = (
            ("paged_decode", self.layer_kv_bytes,
             lambda i: self.backend.attend(i % layers, query, new, new, self.step)),
            ("write_kv", prompt_bytes + self.layer_kv_bytes,
             lambda i: self.backend.write_kv(i % layers, self.key, self.key, self.prompt)),
            ("gather_kv", one + out_bytes,
             lambda i: self.kernels.gather_kv(i % layers, table, self.context, torch.bfloat16)),
            ("checksum", self.layout.total_bytes, lambda i: self.kernels.checksums(ids)),
            ("copy_ranges", 2 * half * self.layout.block_bytes,
             lambda i: self.kernels.copy_ranges(storage, storage, targets, sources, self.layout.block_bytes)),
        )  # fmt: skip
        for name, num_bytes, call in cases:
            timing = time_calls(call, self.device, repetitions=scale.repetitions)
            floor_s = num_bytes / bandwidth
            yield Measurement(
                name=name,
                kv_dtype=self.layout.dtype.value,
                shape=f"{self.num_sequences} x {self.context}",
                median_us=round(timing.median_s * 1e6, 2),
                p99_us=round(timing.p99_s * 1e6, 2),
                floor_us=round(floor_s * 1e6, 2),
                share_of_floor=round(floor_s / timing.median_s, 3),
                sdpa_us=self._sdpa_us(query) if name == "paged_decode" else None,
            )

    def _sdpa_us(self, query: torch.Tensor) -> float:
        scale = self.scale
        shape = (self.num_sequences, scale.num_kv_heads, self.context, scale.head_dim)
        key = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        folded = query.view(self.num_sequences, scale.num_kv_heads, -1, scale.head_dim)
        timing = time_calls(
            lambda _: scaled_dot_product_attention(folded, key, key),
            self.device,
            repetitions=scale.repetitions,
        )
        return round(timing.median_s * 1e6, 2)


def measure_kernels(device: torch.device, scale: Scale, bandwidth: float) -> list[Measurement]:
    """Measure every kernel on every batch, in bf16 and fp8."""
    return [
        line
        for dtype in (KVDtype.BFLOAT16, KVDtype.FP8_E4M3)
        for num_sequences, context in scale.batches
        for line in Case(dtype, num_sequences, context, device, scale).measure(bandwidth)
    ]
