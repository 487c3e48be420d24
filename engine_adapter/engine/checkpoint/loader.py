"""Reads a checkpoint directory in Hugging Face's layout into named tensors.

Decides what a complete checkpoint is: every tensor that the architecture needs is present with its exact
shape, or loading fails with one line that names it. Tensors are memory-mapped, and stay so if the requested
dtype is wider: widening is exact, so it is done when computing. A checkpoint must therefore not be
overwritten in place while a worker runs; writing a new file and renaming it is safe. The fingerprint covers
every byte that can affect a token's keys and values.

It does not know where checkpoints come from (`model_store`) or how they are run (`model`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine_adapter.engine.checkpoint.fingerprint import fingerprint_directory
from engine_adapter.engine.model.model_config import ModelConfig, UnsupportedModel


class ModelUnusable(Exception):
    """The model cannot be served; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A checkpoint in memory. `weights` uses Hugging Face's tensor names."""

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    dtype: torch.dtype  # to compute in; the weights may be narrower
    fingerprint: str  # hex; equal for equal config, weights, tokenizer, template and dtype


def load_model(path: Path | str, dtype: torch.dtype) -> LoadedModel:
    """Load a directory with `config.json` and `*.safetensors` (one file or sharded), to compute in `dtype`.

    Raises:
        ModelUnusable: files missing or broken, another architecture, tensors missing or misshapen.
    """
    directory = Path(path)
    config = read_config(directory)
    weights = _read_weights(directory, expected_shapes(config), dtype)
    fingerprint = fingerprint_directory(directory, dtype=str(dtype).removeprefix("torch."))
    return LoadedModel(config=config, weights=weights, dtype=dtype, fingerprint=fingerprint)


def read_config(directory: Path) -> ModelConfig:
    """Read `config.json`; end-of-text ids in `generation_config.json` take precedence."""
    raw = read_json(directory / "config.json")
    if raw is None:
        raise ModelUnusable(f"{directory} has no config.json: give a Hugging Face directory or a .gguf file")
    generation = read_json(directory / "generation_config.json") or {}
    if generation.get("eos_token_id") is not None:
        raw = {**raw, "eos_token_id": generation["eos_token_id"]}
    try:
        return ModelConfig.from_hf_config(raw)
    except UnsupportedModel as error:
        raise ModelUnusable(f"{directory} cannot be served: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults that the checkpoint recommends (`generation_config.json`)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Read the recommended sampling; values of another type than expected are ignored."""
    raw = read_json(directory / "generation_config.json") or {}

    def number(key: str, default: float) -> float:
        value = raw.get(key)
        return float(value) if isinstance(value, int | float) else default

    limit = int(number("max_new_tokens", 0))
    return GenerationDefaults(
        temperature=number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        top_k=int(number("top_k", 0)),
        min_p=number("min_p", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
        max_new_tokens=limit if limit > 0 else None,
    )


def read_json(path: Path) -> dict[str, object] | None:
    """Return the JSON object in a file, or None if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelUnusable(f"{path} does not hold a JSON object")
    return value


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the architecture reads."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden, config.attention_bias),
        "self_attn.k_proj": (keys, hidden, config.attention_bias),
        "self_attn.v_proj": (keys, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, queries, config.attention_output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def is_wider(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether `dtype` represents every number of `stored` exactly, at twice the size. Changes nothing."""
    return dtype is torch.float32 and stored in (torch.bfloat16, torch.float16)


def _read_weights(
    directory: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(directory, wanted=frozenset(shapes)):
        if tuple(tensor.shape) != shapes[name]:
            raise ModelUnusable(
                f"{directory}: tensor {name} has shape {tuple(tensor.shape)}, config.json says {shapes[name]}"
            )
        weights[name] = tensor if is_wider(dtype, tensor.dtype) else tensor.to(dtype)
    missing = sorted(shapes.keys() - weights.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelUnusable(f"{directory}: the weights lack {missing[0]}{more}")
    return weights


def _tensors(directory: Path, wanted: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the wanted tensors of the safetensors files; others stay on disk."""
    for file in _weight_files(directory):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a safetensors handle is not iterable
                    if name in wanted:
                        yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelUnusable(f"{file} cannot be read: {error}") from error


def _weight_files(directory: Path) -> list[Path]:
    """The shards that the index names, or every safetensors file if there is no index."""
    index = read_json(directory / "model.safetensors.index.json")
    if index is not None:
        weight_map = index.get("weight_map")
        names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
        files = [directory / str(name) for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelUnusable(f"{directory} has no *.safetensors weights")
    for file in files:
        if not file.is_file():
            raise ModelUnusable(f"{file} is in the index but missing: download the checkpoint again")
    return files
