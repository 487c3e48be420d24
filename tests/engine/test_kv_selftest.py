"""Quantised KV: measured at start, falling back per layer, and never silently."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from engine.tiny_models import TINY, generate, greedy_request, random_weights, run_all, tiny_loaded

from engine_adapter.engine.checkpoint.loader import LoadedModel
from engine_adapter.engine.core.config import EngineConfig
from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.kv_selftest import built_in_prompts
from engine_adapter.engine.model.model_config import ModelConfig
from paged_kv.layout import KVDtype

# A head of 64 numbers is what real models have; with 8 the scales alone would be a third of the memory.
WIDE = dataclasses.replace(TINY, head_dim=64, num_hidden_layers=3, attention_bias=True)


def gentle_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Weights of a trained model's size, so that rounding KV moves the distributions only a little."""
    return {
        name: tensor if "norm" in name else tensor * 0.4 for name, tensor in random_weights(config).items()
    }


def engine_with(weights: dict[str, torch.Tensor], kv_dtype: str, **settings: Any) -> LLMEngine:
    config = EngineConfig(
        **{"dtype": "fp32", "kv_dtype": kv_dtype, "block_size": 4, "kv_memory_bytes": 1 << 20, **settings}
    )
    return LLMEngine(LoadedModel(config=WIDE, weights=weights, dtype=torch.float32, fingerprint="f"), config)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_good_model_keeps_every_layer_quantised(kv_dtype: str) -> None:
    """A model without outliers passes the self-test, holds nearly four times the tokens, and generates."""
    engine = engine_with(gentle_weights(WIDE), kv_dtype)
    report = engine.selftest
    assert report is not None
    assert report.fallback_layers == ()
    assert 0 < report.mean_kl <= report.max_mean_kl
    assert report.top1_agreement > 0.9
    assert set(engine.storage.layer_dtypes) == {KVDtype(kv_dtype)}
    ratio = engine.stats().num_blocks_total / engine.num_blocks_unquantised
    assert ratio >= 3.7  # against fp32; against bf16 it is half of that
    assert len(generate(engine, list(range(30)), 8)) == 8
    engine.verify()


def test_layer_with_outliers_falls_back_alone(caplog: pytest.LogCaptureFixture) -> None:
    """One layer whose keys have a huge constant channel is stored wide; the others stay quantised."""
    weights = gentle_weights(WIDE)
    weights["model.layers.1.self_attn.k_proj.bias"][5] = 3000.0
    weights["model.layers.1.self_attn.k_proj.bias"][64 + 5] = 3000.0
    engine = engine_with(weights, "int8", max_kv_mean_kl=1e-4)
    report = engine.selftest
    assert report is not None
    assert report.fallback_layers == (1,)
    assert report.mean_kl_before > report.max_mean_kl >= report.mean_kl
    assert engine.storage.layer_dtypes == (KVDtype.INT8, KVDtype.FLOAT32, KVDtype.INT8)
    assert "kv_dtype_fell_back" in caplog.text
    assert len(generate(engine, list(range(30)), 8)) == 8


def test_limit_that_nothing_meets_switches_quantisation_off() -> None:
    """With a limit of zero every layer falls back, and the engine then answers as an unquantised one."""
    engine = engine_with(gentle_weights(WIDE), "fp8_e4m3", max_kv_mean_kl=0.0)
    assert engine.selftest is not None
    assert engine.selftest.is_off
    plain = engine_with(gentle_weights(WIDE), "auto")
    assert plain.selftest is None
    assert generate(engine, list(range(30)), 8) == generate(plain, list(range(30)), 8)


def test_quantised_hit_equals_quantised_miss() -> None:
    """Within one quantised engine, reuse changes nothing: new tokens too are read back as stored."""
    engine = engine_with(gentle_weights(WIDE), "fp8_e4m3")
    prompt = [(7 * i) % 97 for i in range(41)]
    cold = generate(engine, prompt, 10)
    outputs = run_all(engine, [greedy_request("warm", prompt, 10)])["warm"]
    assert [token for output in outputs for token in output.new_token_ids] == cold
    assert outputs[-1].num_cached_tokens == 40


def test_blocks_of_another_storage_type_have_other_names() -> None:
    """KV dtype is part of the root: a quantised engine's names never match an unquantised one's."""
    roots = {engine_with(gentle_weights(WIDE), kind).root for kind in ("auto", "fp8_e4m3", "int8")}
    assert len(roots) == 3


def test_given_prompts_are_what_is_measured() -> None:
    """Prompts from the caller's tokenizer replace the pseudo-random ones, and change the figure."""
    config = EngineConfig(dtype="fp32", kv_dtype="fp8_e4m3", block_size=4, num_kv_blocks=8)
    figures = []
    for prompts in (None, built_in_prompts(97), [[1, 2, 3, 4, 5, 6, 7, 8]]):
        loaded = LoadedModel(config=WIDE, weights=gentle_weights(WIDE), dtype=torch.float32, fingerprint="f")
        engine = LLMEngine(loaded, config, selftest_prompts=prompts)
        assert engine.selftest is not None
        figures.append(engine.selftest.mean_kl_before)
    assert figures[0] == figures[1]
    assert figures[0] != figures[2]


def test_memory_below_one_block_is_refused() -> None:
    """Too little KV memory is one clear error at start."""
    with pytest.raises(ValueError, match="do not hold a block"):
        LLMEngine(tiny_loaded(), EngineConfig(dtype="fp32", kv_memory_bytes=100))
