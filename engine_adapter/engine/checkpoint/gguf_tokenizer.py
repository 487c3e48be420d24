"""Converts the byte-level BPE tokenizer of a GGUF file to `tokenizer.json`.

Decides which pre-tokenizers are known: GGUF only names them (`tokenizer.ggml.pre`), and the reader must know
the rules. A wrong rule gives plausible but different ids, so an unknown name is refused. The patterns are
those of the published `tokenizer.json` of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from engine_adapter.engine.checkpoint.loader import ModelUnusable

CONTROL, USER_DEFINED = 3, 4  # gguf.TokenType

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")


def tokenizer_files(source: Path, metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the contents of `tokenizer.json` (text) and `tokenizer_config.json` (object).

    Raises:
        ModelUnusable: not byte-level BPE, or an unknown pre-tokenizer.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre"))
    if kind != "gpt2":
        raise ModelUnusable(
            f"{source} has a {kind!r} tokenizer, only byte-level BPE is read from GGUF: "
            "use the Hugging Face directory instead"
        )
    tokens, merges = _strings(metadata, "tokens"), _strings(metadata, "merges")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = _pre_tokenizer(source, pre)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type")
    for token, token_kind in zip(tokens, kinds if isinstance(kinds, list) else [], strict=False):
        added = AddedToken(token, special=token_kind == CONTROL, normalized=False)
        if token_kind == CONTROL:
            tokenizer.add_special_tokens([added])
        elif token_kind == USER_DEFINED:
            tokenizer.add_tokens([added])
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": _tokenizer_config(metadata, tokens),
    }


def _tokenizer_config(metadata: Mapping[str, object], tokens: list[str]) -> dict[str, object]:
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
    }
    ids = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
    for name, key in ids.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _pre_tokenizer(source: Path, name: str) -> pre_tokenizers.PreTokenizer:
    if name in ("smollm", "default", "gpt-2"):
        bytes_with_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if name != "smollm":
            return bytes_with_words
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_with_words])
    patterns = {"qwen2": QWEN2_PATTERN, "llama-bpe": LLAMA3_PATTERN}
    if name not in patterns:
        raise ModelUnusable(
            f"{source} uses the unknown pre-tokenizer {name!r}: use the Hugging Face directory instead"
        )
    split = pre_tokenizers.Split(Regex(patterns[name]), behavior="isolated")
    whole_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, whole_bytes])


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise ModelUnusable(f"the GGUF file lacks tokenizer.ggml.{key}")
    return [str(item) for item in value]
