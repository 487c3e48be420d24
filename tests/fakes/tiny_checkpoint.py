"""A tiny random Llama checkpoint on disk, with a byte-level tokenizer and a chat template.

It answers nonsense at once, which is all that tests of processes, routing and exactness need.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_adapter.engine.checkpoint.loader import expected_shapes
from engine_adapter.engine.model.model_config import ModelConfig

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_checkpoint(directory: Path, *, seed: int = 0, context_tokens: int = 8192) -> Path:
    """Write a Hugging Face directory; the same seed gives the same weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256 + len(SPECIAL_TOKENS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: (1 + 0.2 * torch.randn(shape, generator=generator))
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator) * 0.25
        for name, shape in expected_shapes(ModelConfig.from_hf_config(config)).items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
    return directory


def _write_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": CHAT_TEMPLATE,
                "eos_token": "<|im_end|>",
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        )
    )
