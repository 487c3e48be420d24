"""The default chat model behind the worker's HTTP surface: sensible text, the real template, reuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from engine.worker_app import Worker, running_worker

from engine_adapter.engine.checkpoint.model_store import prepare_model
from engine_adapter.engine.text.chat_template import ChatTemplate
from engine_adapter.engine.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

CONVERSATION = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "Größe 42? 日本語 😀  two  spaces\n\tand tabs"},
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return prepare_model(None)


async def chat(worker: Worker, messages: list[dict[str, str]], **fields: object) -> dict[str, Any]:
    response = await worker.chat(messages=messages, max_tokens=16, ignore_eos=False, **fields)
    assert response.status == 200
    answer: dict[str, Any] = await response.json()
    return answer


async def test_it_answers_sensibly_and_reuse_changes_nothing(directory: Path) -> None:
    """The capital of France is named; turn two is a hit, and equals the same turn computed cold (fp32)."""
    async with running_worker(directory, block_size=16, num_kv_blocks=64) as worker:
        history = [CONVERSATION[0]]
        first = await chat(worker, history)
        text = first["choices"][0]["message"]["content"]
        assert "Paris" in text
        assert first["choices"][0]["finish_reason"] == "stop"
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": "And of Italy?"}]
        warm = await chat(worker, history)
        cold = await chat(worker, history, cache_salt="cold")
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["choices"] == cold["choices"]


def test_prompts_equal_those_of_transformers(directory: Path) -> None:
    """Template and tokenizer give the ids that the reference implementation gives for the same files."""
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    expected = reference.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    tokenizer = load_tokenizer(directory, ())
    rendered = ChatTemplate(tokenizer.files).render(CONVERSATION)
    assert rendered == expected
    ids = reference(expected, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(rendered, add_special_tokens=False) == ids
