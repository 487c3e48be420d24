"""Whole JSON answers: usage, why they ended and their ids, per dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.values import Api, Usage
from gateway.wire.answers import observe_json
from gateway.wire.usage import WireUsage, merge_usage, plausible

CHAT = {"id": "c", "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}


def chat(usage: object) -> dict[str, Any]:
    return CHAT | {"usage": usage}


GENERATE_INFO = {"id": "g", "finish_reason": {"type": "length"}, "prompt_tokens": 3, "completion_tokens": 1}
RESPONSES_USAGE = {"input_tokens": 5, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 4}}
MESSAGES_USAGE = {
    "input_tokens": 5,
    "output_tokens": 1,
    "cache_read_input_tokens": 90,
    "cache_creation_input_tokens": 5,
}
NOTHING = ((None, None, None), None, None)


@pytest.mark.parametrize(
    ("api", "answer", "expected"),
    [
        (
            Api.CHAT,
            chat({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}),
            ((9, 2, 8), "stop", "c"),
        ),
        (Api.CHAT, chat({"prompt_tokens": 9, "completion_tokens": 0}), ((9, 0, None), "stop", "c")),
        (Api.CHAT, chat({"prompt_tokens_details": {"cached_tokens": 0}}), ((None, None, 0), "stop", "c")),
        (Api.CHAT, chat(None), ((None, None, None), "stop", "c")),
        (Api.CHAT, CHAT, ((None, None, None), "stop", "c")),
        (Api.CHAT, chat({"prompt_tokens": "9"}), NOTHING),
        (Api.EMBEDDINGS, {"data": [], "usage": {"prompt_tokens": 3}}, ((3, None, None), None, None)),
        (
            Api.RESPONSES,
            {"id": "r", "status": "completed", "usage": RESPONSES_USAGE},
            ((5, 1, 4), "completed", "r"),
        ),
        (
            Api.MESSAGES,
            {"id": "m", "type": "message", "stop_reason": "end_turn", "usage": MESSAGES_USAGE},
            ((100, 1, 90), "end_turn", "m"),
        ),
        (Api.MESSAGES, {"input_tokens": 7}, NOTHING),
        (
            Api.GENERATE,
            {"text": "x", "meta_info": GENERATE_INFO | {"cached_tokens": 2}},
            ((3, 1, 2), "length", "g"),
        ),
        (Api.GENERATE, {"text": "x"}, NOTHING),
    ],
)
def test_answers_are_understood_per_dialect(
    api: Api, answer: dict[str, Any], expected: tuple[tuple[int | None, ...], str | None, str | None]
) -> None:
    """0 is a statement, absence is not; Anthropic's cached tokens are added to its input."""
    (prompt, completion, cached), reason, answer_id = expected
    usage = Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
    assert observe_json(api, json.dumps(answer).encode()) == (usage, reason, answer_id)


def test_a_later_event_does_not_take_cached_tokens_back() -> None:
    """Anthropic's `message_delta` may repeat `input_tokens` without the cache counts of `message_start`."""
    start = merge_usage(Usage(), WireUsage(input_tokens=25, cache_read_input_tokens=4096, output_tokens=1))
    assert start == Usage(prompt_tokens=4121, completion_tokens=1, cached_tokens=4096)
    end = merge_usage(start, WireUsage(input_tokens=25, output_tokens=15))
    assert end == Usage(prompt_tokens=4121, completion_tokens=15, cached_tokens=4096)
    full = merge_usage(start, WireUsage(input_tokens=20, cache_read_input_tokens=4000, output_tokens=15))
    assert full == Usage(prompt_tokens=4020, completion_tokens=15, cached_tokens=4000)


@given(
    api=st.sampled_from(Api),
    body=st.binary(max_size=60) | st.sampled_from([b"[" * 5000, b"[]", b"null", b""]),
)
def test_anything_else_says_nothing(api: Api, body: bytes) -> None:
    """HTML, binary data, cut or deep JSON: unknown, never an error."""
    assert observe_json(api, body) == (Usage(), None, None)


@pytest.mark.parametrize(
    ("told", "believed"),
    [
        ((50, 10, 40), (50, 10, 40)),
        ((None, None, None), (None, None, None)),
        ((101, 21, 101), (100, 20, 100)),
        ((10**30, 10**30, 10**30), (100, 20, 100)),
        ((50, 10, 60), (50, 10, 50)),
        ((-1, 10, 5), (None, 10, 0)),
        ((50, -1, -1), (50, None, None)),
    ],
)
def test_reports_count_up_to_what_is_plausible(
    told: tuple[int | None, ...], believed: tuple[int | None, ...]
) -> None:
    """Neither more than the bytes can mean, nor less than nothing, nor more from the cache than there is."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    usage = Usage(**dict(zip(names, told, strict=True)))
    assert plausible(usage, 100, 20) == Usage(**dict(zip(names, believed, strict=True)))
