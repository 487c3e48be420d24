"""What engines tell of their models: fields of each, and nothing that is odd."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.model_list import ModelCard, merge, read_models


def listed(*cards: dict[str, object]) -> bytes:
    return json.dumps({"object": "list", "data": cards}).encode()


def test_fields_of_each_engine() -> None:
    """vLLM and SGLang tell `max_model_len`, llama.cpp the context of a slot; an adapter has a parent."""
    adapter = {"id": "lora", "object": "model", "created": 7, "root": "/l", "parent": "m", "max_model_len": 9}
    assert read_models(listed(adapter, {"id": "m.gguf", "meta": {"n_ctx": 4096, "n_ctx_train": 8192}})) == [
        ModelCard(id="lora", created=7, root="/l", parent="m", context_tokens=9),
        ModelCard(id="m.gguf", context_tokens=4096),
    ]


@pytest.mark.parametrize("length", [0, -1, True, 1.5, "4096", None, [], 1 << 60])
def test_an_odd_length_is_unknown(length: object) -> None:
    """Unknown is no limit."""
    assert read_models(listed({"id": "m", "max_model_len": length, "meta": {"n_ctx": length}})) == [
        ModelCard(id="m")
    ]


@given(st.binary(max_size=200) | st.just(b"[" * 100_000))
def test_no_bytes_make_it_fail(body: bytes) -> None:
    """Also an answer that is no list of models."""
    cards = read_models(body)
    assert cards is None or all(isinstance(card.id, str) for card in cards)


def test_of_several_lengths_the_least_is_told() -> None:
    """N15: clients cut their inputs by it."""
    cards = [
        ModelCard(id="m", context_tokens=131_072, root="r"),
        ModelCard(id="m", context_tokens=32_768),
        ModelCard(id="m", created=5),
        ModelCard(id="other"),
    ]
    assert merge(cards) == {
        "m": ModelCard(id="m", created=5, root="r", context_tokens=32_768),
        "other": ModelCard(id="other"),
    }
