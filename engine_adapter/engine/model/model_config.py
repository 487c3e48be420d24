"""The architecture of one Llama-family checkpoint, as numbers.

Decides which checkpoints the engine runs: everything in a Hugging Face `config.json` that changes the forward
pass is either represented here or refused by name, so an unknown variant never runs as a wrong Llama. It does
not know torch, files or weights.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

JsonObject = Mapping[str, object]

# Biases that the config cannot express follow from the family.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class UnsupportedModel(ValueError):
    """The checkpoint needs a forward pass that this engine lacks; the message names the field."""


class RopeType(enum.Enum):
    """How rotary frequencies are stretched beyond the length the model was trained at."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Parameters of one scaling rule; fields that the rule does not use keep their neutral value."""

    rope_type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position_embeddings: int | None = None  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None means derived from factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range outwards to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the forward pass needs to know."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before rotation (Qwen3)
    sliding_window: int | None = None  # tokens that a windowed layer sees, itself included
    full_attention_layers: frozenset[int] = frozenset()  # layers that ignore sliding_window
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UnsupportedModel(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")

    def window_of_layer(self, layer: int) -> int | None:
        """Return the sliding window of one layer in tokens, or None for full attention."""
        return None if layer in self.full_attention_layers else self.sliding_window

    @property
    def reach_tokens(self) -> int | None:
        """How many tokens, itself included, a token attends to in any layer; None: all of them."""
        return None if self.full_attention_layers else self.sliding_window

    @classmethod
    def from_hf_config(cls, raw: JsonObject) -> ModelConfig:
        """Read a parsed `config.json`.

        Raises:
            UnsupportedModel: another family, or a variant whose forward pass would be wrong here.
        """
        model_type = str(raw.get("model_type", ""))
        if model_type not in _FAMILIES:
            raise UnsupportedModel(f"model_type {model_type!r} is not one of {', '.join(_FAMILIES)}")
        _refuse_unknown_variants(raw)
        hidden_size = _required_int(raw, "hidden_size")
        num_heads = _required_int(raw, "num_attention_heads")
        num_layers = _required_int(raw, "num_hidden_layers")
        max_positions = _int(raw, "max_position_embeddings", 2048)
        has_attention_bias = bool(raw.get("attention_bias", False))
        window, full_layers = _read_sliding_window(raw, model_type, num_layers)
        theta, scaling = _read_rope(raw, max_positions)
        return cls(
            model_type=model_type,
            vocab_size=_required_int(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required_int(raw, "intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=_int(raw, "num_key_value_heads", num_heads),
            head_dim=_int(raw, "head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=_float(raw, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            # Qwen2 has biases on q, k, v and never on o, whatever its config says.
            attention_bias=model_type == "qwen2" or (model_type != "mistral" and has_attention_bias),
            attention_output_bias=model_type in ("llama", "qwen3") and has_attention_bias,
            mlp_bias=model_type == "llama" and bool(raw.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            sliding_window=window,
            full_attention_layers=full_layers,
            eos_token_ids=_token_ids(raw.get("eos_token_id")),
            bos_token_id=next(iter(_token_ids(raw.get("bos_token_id"))), None),
        )


def _refuse_unknown_variants(raw: JsonObject) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported, only 'silu'")
    for key in ("num_experts", "num_local_experts"):
        if raw.get(key):
            raise UnsupportedModel(f"{key}: mixture-of-experts models are not supported")
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantization_config: only unquantised safetensors weights are supported")
    if _float(raw, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor: only fully rotated heads are supported")


def _read_sliding_window(
    raw: JsonObject, model_type: str, num_layers: int
) -> tuple[int | None, frozenset[int]]:
    """Return (window, layers with full attention). Qwen windows only some layers, Mistral all of them."""
    window = raw.get("sliding_window")
    if not isinstance(window, int) or model_type == "llama":
        return None, frozenset()
    layer_types = raw.get("layer_types")
    if model_type == "mistral":
        return window, frozenset()
    if not raw.get("use_sliding_window", False):
        return None, frozenset()
    if isinstance(layer_types, list):
        full_layers = frozenset(i for i, kind in enumerate(layer_types) if kind == "full_attention")
    else:
        # Qwen: layers below max_window_layers are the ones that keep full attention.
        full_layers = frozenset(range(min(_int(raw, "max_window_layers", num_layers), num_layers)))
    return (None, frozenset()) if len(full_layers) == num_layers else (window, full_layers)


def _read_rope(raw: JsonObject, max_positions: int) -> tuple[float, RopeScaling]:
    """Read both forms: `rope_parameters` (one object), and `rope_theta` with `rope_scaling`."""
    joint = raw.get("rope_parameters")
    scaling = joint if isinstance(joint, Mapping) else raw.get("rope_scaling")
    if scaling is None:
        return _float(raw, "rope_theta", 10_000.0), RopeScaling()
    if not isinstance(scaling, Mapping):
        raise UnsupportedModel(f"rope_scaling must be an object, got {type(scaling).__name__}")
    theta = _float(scaling, "rope_theta", _float(raw, "rope_theta", 10_000.0))
    name = str(scaling.get("rope_type", scaling.get("type", "default")))
    try:
        rope_type = RopeType(name)
    except ValueError:
        supported = ", ".join(kind.value for kind in RopeType)
        raise UnsupportedModel(f"rope_type {name!r} is not one of {supported}") from None
    original = _int(
        scaling,
        "original_max_position_embeddings",
        _int(raw, "original_max_position_embeddings", max_positions),
    )
    return theta, RopeScaling(
        rope_type=rope_type,
        factor=_float(scaling, "factor", 1.0),
        low_freq_factor=_float(scaling, "low_freq_factor", 1.0),
        high_freq_factor=_float(scaling, "high_freq_factor", 4.0),
        original_max_position_embeddings=original,
        beta_fast=_float(scaling, "beta_fast", 32.0),
        beta_slow=_float(scaling, "beta_slow", 1.0),
        attention_factor=_optional_float(scaling, "attention_factor"),
        mscale=_optional_float(scaling, "mscale"),
        mscale_all_dim=_optional_float(scaling, "mscale_all_dim"),
        truncate=bool(scaling.get("truncate", True)),
    )


def _required_int(raw: JsonObject, key: str) -> int:
    if raw.get(key) is None:
        raise UnsupportedModel(f"config lacks {key!r}")
    return _int(raw, key, 0)


def _int(raw: JsonObject, key: str, default: int) -> int:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnsupportedModel(f"{key} must be an integer, got {value!r}")
    return value


def _float(raw: JsonObject, key: str, default: float) -> float:
    value = _optional_float(raw, key)
    return default if value is None else value


def _optional_float(raw: JsonObject, key: str) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedModel(f"{key} must be a number, got {value!r}")
    return float(value)


def _token_ids(value: object) -> tuple[int, ...]:
    """Accept one id, a list of ids or nothing: config files have all three."""
    if isinstance(value, int):
        return (value,)
    return tuple(int(item) for item in value) if isinstance(value, list) else ()
