"""The forward pass and the cache on the real chat model. Slow parts are shared; needs its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from engine.tiny_models import generate, greedy_request, run_all, tokens_of

from engine_adapter.engine.checkpoint.loader import load_model
from engine_adapter.engine.checkpoint.model_store import prepare_model
from engine_adapter.engine.core.config import EngineConfig
from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.kv_selftest import SELFTEST_TEXTS, SelfTestReport, choose_layer_dtypes
from engine_adapter.engine.kv.kv_storage import KVStorage
from engine_adapter.engine.model.model import LlamaModel
from engine_adapter.engine.text.tokenizer import load_tokenizer
from paged_kv.batch import AttentionBatch
from paged_kv.layout import KVDtype

pytestmark = pytest.mark.model

MAX_LOGIT_ERROR_FP32 = 1e-3  # absolute, measured 7e-5
# Root mean square error over the logits' own spread, against fp32, measured on the built-in texts:
MAX_RELATIVE_ERROR = {
    KVDtype.BFLOAT16: 0.06,  # weights, activations and KV in bf16: 0.034 to 0.042
    KVDtype.FP8_E4M3: 0.12,  # KV alone in fp8: 0.041 to 0.074
}


@pytest.fixture(scope="module")
def directory() -> Path:
    return prepare_model(None)


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(directory, ())
    return [tokenizer.encode(text) for text in SELFTEST_TEXTS]


@pytest.fixture(scope="module")
def model(directory: Path) -> LlamaModel:
    loaded = load_model(directory, torch.float32)
    return LlamaModel(loaded.config, loaded.weights, dtype=loaded.dtype)


def logits_of(model: LlamaModel, prompt: list[int], chunks: list[int], kv_dtype: KVDtype) -> torch.Tensor:
    storage = KVStorage(
        model.config,
        num_blocks=4,
        block_size=16,
        layer_dtypes=[kv_dtype] * model.config.num_hidden_layers,
    )
    pieces, start = [], 0
    for length in chunks:
        batch = AttentionBatch.build(
            query_lens=[length], context_lens=[start + length], block_tables=[[3, 1, 0, 2]], block_size=16
        )
        with torch.inference_mode():
            logits = model.forward(
                torch.tensor(prompt[start : start + length]),
                torch.arange(start, start + length),
                batch,
                storage.layers,
                torch.arange(length),
            )
        assert logits is not None
        pieces.append(logits)
        start += length
    return torch.cat(pieces)


def test_logits_equal_transformers(directory: Path, model: LlamaModel, prompts: list[list[int]]) -> None:
    """On real weights every logit equals transformers' own to fp32 rounding, in chunks and decodes too."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = prompts[1][:33]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    for chunks in ([33], [20, 12, 1]):
        error = (logits_of(model, prompt, chunks, KVDtype.FLOAT32) - expected).abs().max()
        assert error < MAX_LOGIT_ERROR_FP32


@pytest.mark.parametrize("kv_dtype", MAX_RELATIVE_ERROR)
def test_narrow_types_stay_within_their_stated_bound(
    directory: Path, model: LlamaModel, prompts: list[list[int]], kv_dtype: KVDtype
) -> None:
    """bf16 as a whole, and fp8 KV, move the logits by no more than the bounds stated above."""
    narrow = model
    if kv_dtype is KVDtype.BFLOAT16:
        loaded = load_model(directory, torch.bfloat16)
        narrow = LlamaModel(loaded.config, loaded.weights, dtype=loaded.dtype)
    prompt = prompts[0]
    expected = logits_of(model, prompt, [len(prompt)], KVDtype.FLOAT32)
    for chunks in ([len(prompt)], [len(prompt) - 1, 1]):
        difference = logits_of(narrow, prompt, chunks, kv_dtype) - expected
        relative = difference.square().mean().sqrt() / expected.std()
        assert 1e-4 < relative < MAX_RELATIVE_ERROR[kv_dtype]


@pytest.fixture(scope="module")
def fp8_report(model: LlamaModel, prompts: list[list[int]]) -> SelfTestReport:
    _, report = choose_layer_dtypes(
        model,
        wanted=KVDtype.FP8_E4M3,
        fallback=KVDtype.FLOAT32,
        block_size=16,
        prompts=prompts,
        max_mean_kl=0.02,
    )
    return report


def test_fp8_meets_its_stated_thresholds(fp8_report: SelfTestReport) -> None:
    """fp8 KV on the built-in texts: no layer falls back, KL at most 0.02, the best token agrees in 93 %."""
    assert fp8_report.fallback_layers == ()
    assert fp8_report.mean_kl <= 0.02
    assert fp8_report.top1_agreement >= 0.93


def test_chat_turns_hit_and_equal_a_cold_engine(directory: Path, prompts: list[list[int]]) -> None:
    """The second turn of a chat reuses whole blocks and answers as an engine without a cache."""
    warm = LLMEngine.from_path(directory, EngineConfig(dtype="fp32", num_kv_blocks=32))
    first = generate(warm, prompts[0], 8)
    second = prompts[0] + first + prompts[3]
    outputs = run_all(warm, [greedy_request("second", second, 8)])["second"]
    assert outputs[-1].num_cached_tokens == (len(prompts[0]) + 7) // 16 * 16
    cold = LLMEngine.from_path(
        directory, EngineConfig(dtype="fp32", num_kv_blocks=32, enable_prefix_caching=False)
    )
    assert tokens_of(outputs) == generate(cold, second, 8)
    warm.verify()
