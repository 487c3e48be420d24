"""The stream observer: what it sees in each dialect, and that no way of cutting a stream changes it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.values import Api, Usage
from gateway.wire.sse import SseObserver

GOLDEN = Path(__file__).parent.parent / "golden" / "sse"

FIELDS = (
    "usage",
    "finish_reason",
    "response_id",
    "has_first_token",
    "is_complete",
    "has_error",
    "is_mid_event",
    "num_events",
)


def usage(prompt: int | None, completion: int | None, cached: int | None) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


# name: (api, usage, finish reason, id, first token, complete, error, mid-event, events)
EXPECTED: dict[str, tuple[Api, Any]] = {
    "chat_usage_last": (Api.CHAT, (usage(1200, 3, 1184), "stop", "chatcmpl-7", True, True, False, False, 8)),
    "chat_spaced": (Api.CHAT, (usage(5, 2, None), "length", "chatcmpl-7", True, True, False, False, 5)),
    "chat_tools_no_usage": (
        Api.CHAT, (usage(None, None, None), "tool_calls", "chatcmpl-7", True, True, False, False, 4)),
    "chat_zero_usage": (Api.CHAT, (usage(9, 0, 0), "stop", "chatcmpl-7", True, True, False, False, 4)),
    "chat_error": (Api.CHAT, (usage(None, None, None), None, "chatcmpl-7", True, False, True, False, 2)),
    "chat_cut": (Api.CHAT, (usage(None, None, None), None, "chatcmpl-7", True, False, False, True, 2)),
    "completions": (Api.COMPLETIONS, (usage(4, 1, None), "stop", "cmpl-1", True, True, False, False, 4)),
    "responses": (Api.RESPONSES, (usage(75, 2, 64), "completed", "resp_1", True, True, False, False, 7)),
    "responses_failed": (
        Api.RESPONSES, (usage(None, None, None), "failed", "resp_1", False, True, True, False, 2)),
    "messages": (Api.MESSAGES, (usage(4131, 15, 4096), "end_turn", "msg_01", True, True, False, False, 8)),
    "messages_error": (Api.MESSAGES, (usage(25, 1, None), None, "msg_01", False, False, True, False, 2)),
    "generate": (Api.GENERATE, (usage(8, 1, 4), "stop", "g1", True, True, False, False, 3)),
    "multi_line_data": (Api.CHAT, (usage(1, 1, None), "stop", "chatcmpl-7", True, True, False, False, 3)),
    "garbage": (Api.CHAT, (usage(None, None, None), None, None, False, False, False, False, 6)),
}  # fmt: skip


def read(name: str) -> bytes:
    return (GOLDEN / f"{name}.sse").read_bytes()


def observe(api: Api, *chunks: bytes) -> tuple[Any, ...]:
    """Feed chunks and return the whole visible state."""
    observer = SseObserver(api)
    for chunk in chunks:
        observer.feed(chunk)
    return tuple(getattr(observer, field) for field in FIELDS)


def test_every_transcript_has_an_expectation() -> None:
    """A new transcript cannot be forgotten."""
    assert {path.stem for path in GOLDEN.glob("*.sse")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_transcript_is_understood(name: str) -> None:
    """Usage (0 is 0, unsaid is unknown), finish reason, id, first token, end and error of each dialect."""
    api, expected = EXPECTED[name]
    assert dict(zip(FIELDS, observe(api, read(name)), strict=True)) == dict(
        zip(FIELDS, expected, strict=True)
    )


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("name", EXPECTED)
def test_one_cut_anywhere_changes_nothing(name: str, line_end: bytes) -> None:
    """Every stream, in each line ending, cut at every byte."""
    api, expected = EXPECTED[name]
    stream = read(name).replace(b"\n", line_end)
    whole = observe(api, stream)
    if line_end != b"\r":  # the last CR may still be half of a CRLF, so the last event is not over yet
        assert whole == expected
    for cut in range(len(stream)):
        assert observe(api, stream[:cut], stream[cut:]) == whole


@pytest.mark.parametrize("name", EXPECTED)
def test_single_bytes_change_nothing(name: str) -> None:
    """The slowest backend there is."""
    api, expected = EXPECTED[name]
    stream = read(name)
    assert observe(api, *(stream[at : at + 1] for at in range(len(stream)))) == expected


@settings(max_examples=150, deadline=None)
@given(
    api=st.sampled_from([Api.CHAT, Api.MESSAGES, Api.RESPONSES, Api.GENERATE]),
    lines=st.lists(
        st.sampled_from(
            [
                b"",
                b": comment",
                b"data",
                b"data:",
                b"data: [DONE]",
                b"event: error",
                b'data: {"id":"a","choices":[{"delta":{"content":"x"},"finish_reason":null}],"usage":null}',
                b'data: {"id":"b","choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}',
                b'data: {"choices":[],"usage": {"completion_tokens":2}}',
                b'data: {"type":"content_block_delta"}',
                b'data: {"type":"message_delta","usage":{"output_tokens":3},"delta":{"stop_reason":"x"}}',
                b'data: {"type":"response.output_text.delta"}',
                b'data: {"type":"response.completed","response":{"id":"r","usage":{"input_tokens":4}}}',
                b'data: {"text":"t","meta_info":{"prompt_tokens":5}}',
                b'data: {"error":"x"}',
            ]
        ),
        max_size=14,
    ),
    ends=st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n"]), min_size=14, max_size=14),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
)
def test_no_chunking_of_any_stream_changes_what_is_seen(
    api: Api, lines: list[bytes], ends: list[bytes], cuts: list[int]
) -> None:
    """Mixed line endings, blank lines, comments and events in any order, cut anywhere any number of times."""
    stream = b"".join(line + end for line, end in zip(lines, ends, strict=False))
    borders = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    chunks = [stream[start:end] for start, end in itertools.pairwise(borders)]
    assert observe(api, *chunks) == observe(api, stream)


def test_an_event_is_judged_alone_whatever_stands_beside_it() -> None:
    """A dull event with the first id is left alone, in a read of its own or in one with the end."""
    token = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    late = b'data: {"id":"late","choices":[{"delta":{"content":"y"},"finish_reason":null}]}\n\n'
    done = b"data: [DONE]\n\n"
    assert observe(Api.CHAT, token, late, done) == observe(Api.CHAT, token, late + done)


def test_a_token_is_seen_when_it_comes() -> None:
    """An empty role chunk is no token; reasoning and refusals are."""
    observer = SseObserver(Api.CHAT)
    observer.feed(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
    assert not observer.has_first_token
    observer.feed(b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n')
    assert not observer.has_first_token
    assert observer.is_mid_event
    observer.feed(b"\n")
    assert observer.has_first_token
    assert not observer.is_mid_event


def test_an_event_too_large_to_keep_is_let_pass() -> None:
    """Its bytes are not hoarded, its neighbours are seen, whatever the chunks."""
    huge = (
        b'data: {"choices":[{"delta":{"content":"'
        + b"x" * (3 << 20)
        + b'"}}],"usage":{"prompt_tokens":7}}\n\n'
    )
    after = b'data: {"choices":[{"delta":{"content":"x"}}],"usage":{"prompt_tokens":1}}\n\n'
    whole = observe(Api.CHAT, huge + after)
    pieces = [huge[at : at + 65_536] for at in range(0, len(huge), 65_536)]
    assert observe(Api.CHAT, *pieces, after) == whole
    assert whole[0] == usage(1, None, None)
    assert whole[-1] == 2
    observer = SseObserver(Api.CHAT)
    for piece in pieces[:-1]:
        observer.feed(piece)
    assert sum(map(len, observer._pending)) < (2 << 20) + 65_536
