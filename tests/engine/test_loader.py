"""Loading checkpoints: complete or refused by name; the fingerprint follows the bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from fakes.tiny_checkpoint import write_tiny_checkpoint
from safetensors.torch import load_file, save_file

from engine_adapter.engine.checkpoint.loader import (
    GenerationDefaults,
    ModelUnusable,
    load_model,
    read_generation_defaults,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are remembered in a folder of the test's own."""
    monkeypatch.setenv("HOMING_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny")


def edit_config(checkpoint: Path, **changes: object) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(checkpoint: Path, **changes: torch.Tensor | None) -> None:
    path = checkpoint / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, path)


def test_weights_come_in_the_asked_dtype(checkpoint: Path) -> None:
    """Every tensor is converted, and holds the file's values."""
    stored = load_file(checkpoint / "model.safetensors")
    loaded = load_model(checkpoint, torch.bfloat16)
    assert loaded.weights.keys() == stored.keys()
    assert {tensor.dtype for tensor in loaded.weights.values()} == {torch.bfloat16}
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(loaded.weights[name], stored[name].bfloat16())


def test_sharded_weights_equal_whole_ones(checkpoint: Path) -> None:
    """An index with two shards loads the same tensors."""
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    whole = load_model(checkpoint, torch.float32).weights
    names = sorted(weights)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, checkpoint / file)
    path.unlink()
    weight_map = {name: file for file, part in halves.items() for name in part}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = load_model(checkpoint, torch.float32).weights
    assert all(torch.equal(sharded[name], whole[name]) for name in names)


def test_the_end_ids_of_the_generation_config_win(checkpoint: Path) -> None:
    """Chat checkpoints list their end of turn only there."""
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_model(checkpoint, torch.float32).config.eos_token_ids == (5, 6)


def test_recommended_sampling_is_read_and_nonsense_ignored(checkpoint: Path) -> None:
    """Missing and mistyped values leave OpenAI's defaults."""
    (checkpoint / "generation_config.json").write_text(
        json.dumps({"temperature": 0.2, "top_p": "high", "max_new_tokens": 99})
    )
    expected = GenerationDefaults(temperature=0.2, max_new_tokens=99)
    assert read_generation_defaults(checkpoint) == expected


def test_equal_bytes_have_equal_fingerprints(checkpoint: Path, tmp_path: Path) -> None:
    """Two copies of a checkpoint name the same KV, whatever their folder."""
    copy = write_tiny_checkpoint(tmp_path / "copy")
    assert load_model(checkpoint, torch.float32).fingerprint == load_model(copy, torch.float32).fingerprint


@pytest.mark.parametrize("change", ["weights", "config", "tokenizer", "template", "dtype"])
def test_whatever_changes_kv_or_tokens_changes_the_fingerprint(checkpoint: Path, change: str) -> None:
    """A cache written under one fingerprint is never read under the other."""
    before = load_model(checkpoint, torch.float32).fingerprint
    dtype = torch.float32
    if change == "weights":
        edit_weights(checkpoint, **{"model.norm.weight": torch.full((32,), 0.5)})
    elif change == "config":
        edit_config(checkpoint, rope_theta=20000.0)
    elif change == "tokenizer":
        (checkpoint / "tokenizer.json").write_text((checkpoint / "tokenizer.json").read_text() + " ")
    elif change == "template":
        (checkpoint / "chat_template.jinja").write_text("x")
    else:
        dtype = torch.bfloat16
    assert load_model(checkpoint, dtype).fingerprint != before


def test_an_unwritable_cache_does_not_prevent_loading(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remembered digests only save time."""
    monkeypatch.setenv("HOMING_CACHE", "/proc/no-such-folder")
    assert load_model(checkpoint, torch.float32).fingerprint


def test_a_missing_config_is_one_clear_line(tmp_path: Path) -> None:
    """An arbitrary folder is distinguished from a broken checkpoint."""
    with pytest.raises(ModelUnusable, match=r"has no config\.json"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "cannot be read"),
        ("config.json", "[]", "JSON object"),
        ("model.safetensors", "garbage", "cannot be read"),
        ("model.safetensors", "", "cannot be read"),
    ],
)
def test_broken_files_are_named(checkpoint: Path, file: str, content: str, message: str) -> None:
    """The error holds the path of the broken file."""
    (checkpoint / file).write_text(content)
    with pytest.raises(ModelUnusable, match=message) as caught:
        load_model(checkpoint, torch.float32)
    assert file in str(caught.value)


def test_truncated_weights_are_refused(checkpoint: Path) -> None:
    """A half-downloaded file is found by its header, before any tensor is used."""
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", whole[:8])
    path.write_bytes(whole[: 8 + header_bytes + 100])
    with pytest.raises(ModelUnusable, match="cannot be read"):
        load_model(checkpoint, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": 300}, r"embed_tokens\.weight has shape"),
        ({"num_hidden_layers": 3}, r"lack model\.layers\.2"),
        ({"tie_word_embeddings": False}, r"lack lm_head\.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    checkpoint: Path, changes: dict[str, object], message: str
) -> None:
    """Another family, unsupported variants and missing or misshapen tensors are named."""
    edit_config(checkpoint, **changes)
    with pytest.raises(ModelUnusable, match=message):
        load_model(checkpoint, torch.float32)


def test_missing_weight_files_are_named(checkpoint: Path) -> None:
    """No weights at all, and a shard that the index names but that is not there."""
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelUnusable, match="no \\*\\.safetensors"):
        load_model(checkpoint, torch.float32)
    index = {"weight_map": {"model.norm.weight": "model-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelUnusable, match="model-00002"):
        load_model(checkpoint, torch.float32)


def test_tensors_that_nothing_reads_are_ignored(checkpoint: Path) -> None:
    """Old checkpoints carry rotary tables; they are left on disk."""
    edit_weights(checkpoint, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in load_model(checkpoint, torch.float32).weights
