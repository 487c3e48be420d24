"""The Llama-family forward pass over paged KV, for one ragged batch of tokens.

All tokens of a step, prompts and decodes, are rows of one matrix; only attention knows which row belongs to
which sequence. Families differ by the presence of a tensor (biases, query and key norms) or by a number in
`ModelConfig`, not by a class. Query, key and value projections are one product, gate and up another.

Norms are computed in fp32 and rounded once, as in the checkpoints' own code. Logits are fp32. On a CPU the
weights may stay in their mapped file, and our kernels replace some of torch's operators (`cpu_kernels`). KV
memory is not known here: each layer's attention is a function passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from engine_adapter.engine.model.cpu_kernels import LANES, CPUKernels, fits, kernels_for
from engine_adapter.engine.model.linear import Linear, is_halvable, make_linear
from engine_adapter.engine.model.model_config import ModelConfig
from engine_adapter.engine.model.rope import RotaryEmbedding, rotate
from paged_kv.batch import AttentionBatch

Weights = dict[str, torch.Tensor]
AttendLayer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch], torch.Tensor]
"""Attention of one layer: takes query, key, value and batch; stores key and value before it attends."""


class LlamaModel:
    """Weights of one checkpoint, ready to multiply."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        dtype: torch.dtype | None = None,
        allow_packed: bool = True,
    ) -> None:
        """Take over the weights.

        Args:
            dtype: to compute in; None means that of the embedding.

        Changes: empties `weights` step by step, so that few packed copies exist beside their originals.
        """
        self.config = config
        embedding = weights.pop("model.embed_tokens.weight")
        self.dtype, self.device = dtype or embedding.dtype, embedding.device
        self.rope = RotaryEmbedding(config, self.device)
        self._ops = LayerOperators(self.dtype, self.device, allow_packed=allow_packed)
        self.layers = [
            DecoderLayer(config, weights, index, self._ops) for index in range(config.num_hidden_layers)
        ]
        self.final_norm = weights.pop("model.norm.weight").to(self.dtype, copy=True)
        head = embedding if config.tie_word_embeddings else weights.pop("lm_head.weight")
        self.head = make_linear([head], None, dtype=self.dtype, allow_packed=allow_packed)
        self._embedding = self._ops.keep_table(embedding)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        attention: Sequence[AttendLayer],
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Compute one step; returns the logits of `logit_rows`. Arguments and changes: see `hidden_rows`."""
        hidden = self.hidden_rows(token_ids, positions, batch, attention, logit_rows)
        return None if hidden is None else self.logits(hidden)

    def hidden_rows(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        attention: Sequence[AttendLayer],
        wanted_rows: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Compute one step up to the last layer.

        Args:
            token_ids: `(num_tokens,)` int64, all sequences concatenated in the batch's order.
            positions: `(num_tokens,)` int64, position of each token in its own sequence.
            attention: one function per layer.
            wanted_rows: rows whose logits are needed; None if the step only fills KV.

        Returns:
            `(num_rows, hidden_size)`, or None. Changes: KV at the batch's slots.
        """
        hidden = functional.embedding(token_ids, self._embedding).to(self.dtype)
        cos, sin = self.rope.cos_sin(positions, self.dtype)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            keep_rows = wanted_rows if index == last else None
            hidden = layer.forward(hidden, cos, sin, batch, attention[index], keep_rows)
        return None if wanted_rows is None else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits `(num_rows, vocab_size)`, fp32, of rows from the last layer."""
        return self.head(self._ops.norm(hidden, self.final_norm, self.config.rms_norm_eps)).float()


class LayerOperators:
    """What a layer computes besides attention; uses our kernels where they support dtype and device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, allow_packed: bool) -> None:
        self.dtype, self.allow_packed = dtype, allow_packed
        self._kernels: CPUKernels | None = kernels_for(dtype, device) if allow_packed else None

    def keep_table(self, table: torch.Tensor) -> torch.Tensor:
        """Return the embedding table: the mapped file, if the output head reads it in place, or a copy."""
        if self._kernels is not None and fits(table):
            return table
        # A copy: a single tensor in the mapped file would keep the whole file resident.
        return table.half() if is_halvable(table) else table.clone()

    def norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return `rms_norm`."""
        if self._kernels is not None and weight.numel() % LANES == 0:
            return self._kernels.rms_norm(rows, weight, eps)
        return rms_norm(rows, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of rows that contain both."""
        if self._kernels is not None and gate_up.shape[1] % (2 * LANES) == 0:
            return self._kernels.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def rotate(
        self, heads: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Return the first heads of `(num_tokens, heads, head_dim)` rotated. May change `heads`."""
        if self._kernels is not None and heads.shape[2] % (2 * LANES) == 0 and heads.is_contiguous():
            self._kernels.rotate(heads, num_heads, cos, sin)
            return heads[:, :num_heads]
        return rotate(heads[:, :num_heads], cos, sin)


class DecoderLayer:
    """Attention and gated MLP, each after a norm and added to the residual."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int, ops: LayerOperators) -> None:
        self._config, self._ops = config, ops
        prefix = f"model.layers.{index}."

        def take(name: str) -> torch.Tensor | None:
            tensor = weights.pop(prefix + name, None)
            return None if tensor is None else tensor.to(ops.dtype, copy=True)

        def need(name: str) -> torch.Tensor:
            return weights.pop(prefix + name)

        def linear(*names: str) -> Linear:
            parts = [need(f"{name}.weight") for name in names]
            biases = [bias for name in names if (bias := take(f"{name}.bias")) is not None]
            assert len(biases) in (0, len(names)), f"{prefix}{names}: some have a bias and some have none"
            bias = torch.cat(biases) if biases else None
            return make_linear(parts, bias, dtype=ops.dtype, allow_packed=ops.allow_packed)

        self._input_norm = need("input_layernorm.weight").to(ops.dtype, copy=True)
        self._mlp_norm = need("post_attention_layernorm.weight").to(ops.dtype, copy=True)
        self._query_norm = take("self_attn.q_norm.weight")
        self._key_norm = take("self_attn.k_norm.weight")
        self._qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._attention_out = linear("self_attn.o_proj")
        self._gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self._down = linear("mlp.down_proj")

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: AttentionBatch,
        attention: AttendLayer,
        keep_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the hidden states after this layer, only those of `keep_rows` if given (last layer)."""
        eps = self._config.rms_norm_eps
        query, key, value = self._project(self._ops.norm(hidden, self._input_norm, eps), cos, sin)
        attended = attention(query, key, value, batch).flatten(1)
        if keep_rows is not None:
            hidden, attended = hidden[keep_rows], attended[keep_rows]
        hidden = hidden + self._attention_out(attended)
        normed = self._ops.norm(hidden, self._mlp_norm, eps)
        return hidden + self._down(self._ops.silu_and_mul(self._gate_up(normed)))

    def _project(
        self, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated query and key, and value, each `(num_tokens, heads, head_dim)`."""
        config = self._config
        num_query, num_kv = config.num_attention_heads, config.num_key_value_heads
        num_rotated = num_query + num_kv
        heads = self._qkv(normed).view(-1, num_rotated + num_kv, config.head_dim)
        to_rotate, value = heads, heads[:, num_rotated:]
        if self._query_norm is not None and self._key_norm is not None:
            query = rms_norm(heads[:, :num_query], self._query_norm, config.rms_norm_eps)
            key = rms_norm(heads[:, num_query:num_rotated], self._key_norm, config.rms_norm_eps)
            to_rotate = torch.cat((query, key), dim=1)
        rotated = self._ops.rotate(to_rotate, num_rotated, cos, sin)
        return rotated[:, :num_query], rotated[:, num_query:], value


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale rows to unit mean square, in fp32, then by `weight` in the rows' dtype."""
    if rows.dtype is torch.float32:  # the same arithmetic in half the time
        return functional.rms_norm(rows, weight.shape, weight, eps)
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * wide.to(rows.dtype)
