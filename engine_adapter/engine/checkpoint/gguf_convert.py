"""Converts a GGUF file into a Hugging Face directory.

Decides the mapping of names, shapes and metadata between the two formats. llama.cpp stores the query and key
rows of llama models in the order of its interleaved rotary embedding; Hugging Face's layout rotates halves,
so those rows are reordered (llama.cpp's `permute`, undone). Everything that cannot be converted exactly is
refused by name. Weights become bf16: the quantised source has less precision than that.

It does not know caches or locks (`model_store`) and reads only the given file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

from engine_adapter.engine.checkpoint.gguf_tokenizer import tokenizer_files
from engine_adapter.engine.checkpoint.loader import ModelUnusable

SHARD_BYTES = 4 * 2**30  # bounds the memory that a conversion needs

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

Metadata = Mapping[str, object]
Progress = Callable[[int, int], None]


def convert_gguf(source: Path, target: Path, on_progress: Progress | None = None) -> None:
    """Write the directory `target` (which must exist) from the file `source`.

    Raises:
        ModelUnusable: not a GGUF file, or one that cannot be converted exactly.
    """
    try:
        reader = GGUFReader(source)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelUnusable(f"{source} is not a readable GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(source, metadata, {tensor.name for tensor in reader.tensors})
    documents = {"config.json": config, **tokenizer_files(source, metadata)}
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    documents["generation_config.json"] = ids
    _write_weights(reader, target, config, on_progress)
    for name, document in documents.items():
        text = document if isinstance(document, str) else json.dumps(document, indent=1, ensure_ascii=False)
        (target / name).write_text(text, encoding="utf-8")


def _config(source: Path, metadata: Metadata, tensor_names: set[str]) -> dict[str, object]:
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise ModelUnusable(
            f"{source} holds a {architecture!r} model, supported are {', '.join(ARCHITECTURES)}"
        )
    if "rope_freqs.weight" in tensor_names or f"{architecture}.expert_count" in metadata:
        raise ModelUnusable(
            f"{source} has scaled rotary frequencies or experts: use the Hugging Face directory instead"
        )

    def number(key: str, default: float | None = None) -> int | float:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise ModelUnusable(f"{source} lacks the metadata {architecture}.{key}")
        return value

    if metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise ModelUnusable(f"{source} uses RoPE scaling: use the Hugging Face directory instead")
    hidden, heads = int(number("embedding_length")), int(number("attention.head_count"))
    tokens = metadata.get("tokenizer.ggml.tokens")
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": int(number("feed_forward_length")),
        "num_hidden_layers": int(number("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(number("attention.head_count_kv", heads)),
        "head_dim": int(number("attention.key_length", hidden // heads)),
        "max_position_embeddings": int(number("context_length")),
        # Stored as fp32: 1e-5 is read as 9.999999747378752e-06, so round it.
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(number("rope.freq_base", 10000.0)),
        "vocab_size": len(tokens) if isinstance(tokens, list) else int(number("vocab_size")),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensor_names,
        "torch_dtype": "bfloat16",
    }
    for ours, theirs in {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id"}.items():
        if isinstance(metadata.get(f"tokenizer.ggml.{theirs}"), int):
            config[ours] = metadata[f"tokenizer.ggml.{theirs}"]
    return config


def _write_weights(
    reader: GGUFReader, target: Path, config: Mapping[str, object], on_progress: Progress | None
) -> None:
    shard: dict[str, torch.Tensor] = {}
    shard_bytes, weight_map, num_shards = 0, dict[str, str](), 0

    def flush(file_name: str) -> None:
        save_file(shard, target / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
        shard.clear()

    for index, tensor in enumerate(reader.tensors):
        name = _hf_name(tensor.name)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if config["model_type"] == "llama" and ("q_proj." in name or "k_proj." in name):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            weight = _rotate_halves_order(weight, int(str(config[heads])))
        shard[name] = weight.to(torch.bfloat16).contiguous()
        shard_bytes += shard[name].nbytes
        if shard_bytes >= SHARD_BYTES:
            num_shards, shard_bytes = num_shards + 1, 0
            flush(f"model-{num_shards:05d}.safetensors")
        if on_progress is not None:
            on_progress(index + 1, len(reader.tensors))
    if num_shards == 0:
        flush("model.safetensors")
        return
    if shard:
        flush(f"model-{num_shards + 1:05d}.safetensors")
    document = json.dumps({"metadata": {}, "weight_map": weight_map})
    (target / "model.safetensors.index.json").write_text(document)


def _hf_name(name: str) -> str:
    if name in TOP_LEVEL:
        return TOP_LEVEL[name]
    match name.split("."):
        case ["blk", layer, module, kind] if module in MODULES:
            return f"model.layers.{layer}.{MODULES[module]}.{kind}"
    raise ModelUnusable(f"the GGUF file holds a tensor {name!r} that this architecture does not have")


def _rotate_halves_order(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the interleaving: per head, rows (0, 1, 2, 3 …) were (0, n/2, 1, n/2 + 1 …)."""
    rows = weight.shape[0]
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
