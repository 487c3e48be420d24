"""A Llama-shaped model with random weights: what reuse is worth end to end, without any weights to fetch.

The text is noise, the work is real: the same products, the same KV traffic. A chat of several turns is played
twice, once with its KV kept and once recomputed, then a batch is decoded.
"""

import time
from dataclasses import dataclass, replace

import torch
from kernel_tools.host import make_backend_anywhere
from torch.nn.functional import linear, rms_norm, silu

from paged_kv.arena import KVArena
from paged_kv.backends.attention import AttentionBackend, AttentionBatch
from paged_kv.layout import KVDtype, KVLayout

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model of the Llama 3 family."""

    name: str
    num_layers: int
    hidden: int
    feed_forward: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    system_tokens: int = 2048
    turn_tokens: int = 128
    answer_tokens: int = 64
    num_turns: int = 5
    decode_batch: int = 32


LLAMA_1B = Shape(
    name="1B",
    num_layers=16,
    hidden=2048,
    feed_forward=8192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocabulary=128256,
)
LLAMA_8B = replace(LLAMA_1B, name="8B", num_layers=32, hidden=4096, feed_forward=14336, head_dim=128)
TINY = Shape(
    name="tiny",
    num_layers=2,
    hidden=64,
    feed_forward=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocabulary=100,
    system_tokens=20,
    turn_tokens=6,
    answer_tokens=2,
    num_turns=2,
    decode_batch=2,
)


class RandomLlama:
    """Weights and one forward step."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5

        self.shape = shape
        width = shape.num_heads * shape.head_dim
        kv_width = shape.num_kv_heads * shape.head_dim
        self.embedding = weight(shape.vocabulary, shape.hidden)
        self.layers = [
            (
                weight(width + 2 * kv_width, shape.hidden),
                weight(shape.hidden, width),
                weight(2 * shape.feed_forward, shape.hidden),
                weight(shape.hidden, shape.feed_forward),
            )
            for _ in range(shape.num_layers)
        ]
        half = torch.arange(shape.head_dim // 2, device=device) * 2 / shape.head_dim
        self.frequencies = 500000.0**-half

    def rotate(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply rotary positions to (num_tokens, heads, head_dim)."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos()[:, None].to(rows.dtype), angles.sin()[:, None].to(rows.dtype)
        first, second = rows.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    @torch.inference_mode()
    def step(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, backend: AttentionBackend
    ) -> torch.Tensor:
        """Return the next token of each sequence (num_sequences,)."""
        shape = self.shape
        hidden = self.embedding[tokens]
        for layer, (wqkv, wo, wgate, wdown) in enumerate(self.layers):
            projected = linear(rms_norm(hidden, (shape.hidden,)), wqkv).view(len(tokens), -1, shape.head_dim)
            query, key, value = projected.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
            query, key = self.rotate(query, positions), self.rotate(key, positions)
            backend.write_kv(layer, key, value, batch)
            attended = backend.attend(layer, query, key, value, batch)
            hidden = hidden + linear(attended.reshape(len(tokens), -1), wo)
            gate, up = linear(rms_norm(hidden, (shape.hidden,)), wgate).chunk(2, -1)
            hidden = hidden + linear(silu(gate) * up, wdown)
        last = torch.tensor(batch.query_starts[1:], device=tokens.device) - 1
        return linear(rms_norm(hidden[last], (shape.hidden,)), self.embedding).argmax(-1)


class Player:
    """Plays chats on one model and backend."""

    def __init__(self, model: RandomLlama, dtype: KVDtype, backend: str, device: torch.device) -> None:
        shape = model.shape
        self.length = shape.system_tokens + shape.num_turns * (shape.turn_tokens + shape.answer_tokens)
        self.blocks = -(-self.length // BLOCK_SIZE)
        layout = KVLayout(
            num_layers=shape.num_layers,
            num_blocks=self.blocks * shape.decode_batch,
            block_size=BLOCK_SIZE,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
        )
        arena = KVArena.allocate(layout, str(device))
        self.layout, self.model, self.device = layout, model, device
        self.backend = make_backend_anywhere(
            backend, arena, num_heads=shape.num_heads, scale=shape.head_dim**-0.5
        )

    def run(self, starts: list[int], length: int, first_sequence: int = 0) -> float:
        """Compute `length` random tokens of each sequence; return the seconds until the next token."""
        tables = [
            list(range((first_sequence + i) * self.blocks, (first_sequence + i + 1) * self.blocks))
            for i in range(len(starts))
        ]
        batch = AttentionBatch.build(
            query_lens=[length] * len(starts),
            context_lens=[start + length for start in starts],
            block_tables=tables,
            block_size=BLOCK_SIZE,
        )
        positions = torch.cat([torch.arange(start, start + length) for start in starts]).to(self.device)
        tokens = torch.randint(0, self.model.shape.vocabulary, (len(positions),), device=self.device)
        began = time.perf_counter()
        self.model.step(tokens, positions, batch, self.backend).cpu()
        return time.perf_counter() - began

    def chat(self, *, keeps_kv: bool) -> list[float]:
        """Return the time to first token of each turn, in ms."""
        shape, context, times = self.model.shape, 0, []
        for turn in range(shape.num_turns):
            new = shape.turn_tokens + (shape.system_tokens if turn == 0 else 0)
            start = context if keeps_kv else 0
            times.append(round(1e3 * self.run([start], context + new - start), 2))
            context += new
            for _ in range(shape.answer_tokens if keeps_kv else 0):  # the other chat has computed them before
                self.run([context], 1)
                context += 1
            context += 0 if keeps_kv else shape.answer_tokens
        return times

    def decode_rate(self) -> float:
        """Return tokens per second of a full decode batch at half the longest context."""
        starts = [self.length // 2] * self.model.shape.decode_batch
        seconds = [self.run(starts, 1) for _ in range(8)]
        return round(len(starts) / sorted(seconds)[len(seconds) // 2], 1)


def measure_model(
    shape: Shape, device: torch.device, backend: str, free_bytes: int
) -> list[dict[str, object]]:
    """Return a result per KV type: TTFT by turn with and without reuse, decode rate, capacity."""
    model = RandomLlama(shape, device)
    results: list[dict[str, object]] = []
    for dtype in (KVDtype.BFLOAT16, KVDtype.FP8_E4M3):
        player = Player(model, dtype, backend, device)
        player.chat(keeps_kv=True)  # warm-up: compiles kernels, fills allocator caches
        results.append(
            {
                "model": shape.name,
                "kv_dtype": dtype.value,
                "backend": backend,
                "ttft_ms_with_reuse": player.chat(keeps_kv=True),
                "ttft_ms_without": player.chat(keeps_kv=False),
                "decode_tokens_per_s": player.decode_rate(),
                "decode_batch": shape.decode_batch,
                "kv_bytes_per_token": player.layout.bytes_per_token,
                "kv_tokens_in_free_memory": free_bytes // player.layout.bytes_per_token,
            }
        )
    return results
