"""Rotary position embedding: the frequencies, and the rotation of query and key heads.

The scaling rules are those of the checkpoints' own code (Hugging Face `modeling_rope_utils`), because a model
needs the frequencies it was trained with: `linear` divides all, `llama3` divides the slow ones and blends a
band in between, `yarn` (Peng et al., arXiv:2309.00071) blends by dimension and scales cos and sin. Angles are
computed in fp32 for the positions of one step and shared by all layers; there is no table and no maximum
length.
"""

from __future__ import annotations

import math

import torch

from engine_adapter.engine.model.model_config import ModelConfig, RopeScaling, RopeType


class RotaryEmbedding:
    """Frequencies of one model."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.inv_freq, self.attention_factor = rope_frequencies(config)
        self.inv_freq = self.inv_freq.to(device)

    def cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin for positions `(num_tokens,)`, each `(num_tokens, 1, head_dim)`.

        The first half of sin is negated, which is the sign of the partner in `rotate`.
        """
        angles = (positions.float()[:, None] * self.inv_freq)[:, None, :]
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads `(num_tokens, num_heads, head_dim)`; element i is paired with i + head_dim / 2."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)


def rope_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies `(head_dim / 2,)` fp32 and the factor on cos and sin."""
    scaling = config.rope_scaling
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    if scaling.rope_type is RopeType.LINEAR:
        return inv_freq / scaling.factor, 1.0
    if scaling.rope_type is RopeType.LLAMA3:
        return _llama3(inv_freq, scaling), 1.0
    if scaling.rope_type is RopeType.YARN:
        return _yarn(inv_freq, config), _yarn_attention_factor(scaling)
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    original = _original_length(scaling)
    wavelengths = 2 * math.pi / inv_freq
    slow = wavelengths > original / scaling.low_freq_factor
    fast = wavelengths < original / scaling.high_freq_factor
    smooth = original / wavelengths - scaling.low_freq_factor
    smooth = smooth / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    return torch.where(slow, inv_freq / scaling.factor, torch.where(fast, inv_freq, blended))


def _yarn(inv_freq: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    scaling = config.rope_scaling
    head_dim = config.head_dim

    def dimension_of(num_rotations: float) -> float:
        """Dimension whose frequency makes this many rotations over the original length."""
        ratio = _original_length(scaling) / (num_rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # the reference code's guard against 0 / 0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq / scaling.factor * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def magnitude(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def _original_length(scaling: RopeScaling) -> int:
    assert scaling.original_max_position_embeddings is not None, "read by ModelConfig for every scaling"
    return scaling.original_max_position_embeddings
