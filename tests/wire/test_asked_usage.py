"""The question for usage, and what is taken out of the stream that answers it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.values import Api
from gateway.wire.asked_usage import UsageFilter, with_usage_asked
from gateway.wire.bodies import BodyDecoder, asks_for_no_usage
from gateway.wire.facts import FactsParser
from gateway.wire.settings import KeySettings

USAGE = {"prompt_tokens": 5, "completion_tokens": 7}


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "c", **fields}, separators=(",", ":")).encode()


def delta(text: str) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": {"content": text}}]


KEPT = [
    b": a comment",
    chunk(choices=delta("a")),
    chunk(choices=delta('"usage":{"prompt_tokens":1} of "choices":[]'), usage=None),
    chunk(choices=delta("x" * 20_000)),
    chunk(choices=delta("b"), usage=USAGE),
    chunk(choices=[], prompt_filter_results=["usage"]),
    chunk(choices=[], usage=None),
    chunk(usage=USAGE),
    chunk(choices=[], usage=USAGE, error={"message": "no"}),
    b'data: {"usage"',
    b"event: x\nid: 1",
    b"data: [DONE]",
]
TAKEN = [
    chunk(choices=[], usage=USAGE),
    chunk(choices=[], usage=USAGE) + b" ",
    b'data:{ "usage" : {"prompt_tokens": 1}, "choices": [] }',
    b'data: {"choices":[],\ndata: "usage":{"prompt_tokens":1}}',
]


@given(
    events=st.lists(st.sampled_from([*KEPT, *TAKEN]), max_size=8),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    tail=st.sampled_from([b"", b"data: {", TAKEN[0][:30]]),
    data=st.data(),
)
def test_the_chunk_is_taken_out_and_nothing_else(
    events: list[bytes], line_end: bytes, tail: bytes, data: st.DataObject
) -> None:
    """However a stream is cut, with any line ends: the events that are not usage alone keep their bytes."""
    whole = [event.replace(b"\n", line_end) + 2 * line_end for event in events]
    stream = b"".join(whole) + tail
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    bounds = [0, *sorted(cuts), len(stream)]
    watching, got = UsageFilter("vllm"), b""
    for begin, end in itertools.pairwise(bounds):
        got += watching.feed(stream[begin:end], False)
    got += watching.feed(b"", True)
    kept = [event for event, plain in zip(whole, events, strict=True) if plain in KEPT]
    assert got == b"".join(kept) + tail


def test_complete_events_are_not_held_back() -> None:
    """Each leaves with the read that completes it; an event too long to be usage leaves as it comes."""
    watching = UsageFilter("vllm")
    event = chunk(choices=delta("a")) + b"\n\n"
    assert watching.feed(event + event[:10], False) == event
    assert watching.feed(event[10:], False) == event
    assert watching.feed(b"data: " + b"x" * 20_000, False) == b"data: " + b"x" * 20_000
    assert watching.feed(b"yy\n\n", False) == b"yy\n\n"


def test_our_workers_marks_are_taken_out_too() -> None:
    """It adds `usage: null` to each chunk if it is asked, as OpenAI does."""
    marked, plain = chunk(choices=delta("a"), usage=None), chunk(choices=delta("a"))
    assert UsageFilter("torch").feed(marked + b"\n\n", False) == plain + b"\n\n"
    assert UsageFilter("sglang").feed(marked + b"\n\n", False) == marked + b"\n\n"


@pytest.mark.parametrize(
    "body",
    [
        b'{"stream":true}',
        b'{"stream_options":{"include_usage":false},"stream":true}',
        b'{"stream_options":null, "stream_options" : {"continuous_usage_stats":true}} \n',
        b'{"stream\\u005foptions":null}',
    ],
)
def test_the_question_overrides_what_was_said(body: bytes) -> None:
    """By being last; all other bytes stay. Reports in the middle are not asked for."""
    asked = with_usage_asked(body)
    assert asked.startswith(body.rstrip()[:-1])
    options = json.loads(asked)["stream_options"]
    assert options == {"include_usage": True, "continuous_usage_stats": False}


@pytest.mark.parametrize(
    ("options", "asks_for_none"),
    [
        (b"", True),
        (b"null", True),
        (b'{"include_usage":false}', True),
        (b'{"include_usage":null,"continuous_usage_stats":true}', True),
        (b'{"include_usage":true}', False),
        (b'{"include_usage":true,"include_usage":false}', True),
        (b"{}", False),
        (b'{"include_usage":1}', False),
        (b'{"include_usage":"true"}', False),
        (b'"odd"', False),
        (b"[]", False),
    ],
)
def test_only_a_clear_no_is_overridden(options: bytes, asks_for_none: bool) -> None:
    """What engines understand differently, or refuse, is theirs to judge."""
    assert asks_for_no_usage(options) is asks_for_none


@pytest.mark.parametrize(
    ("api", "body", "lacks_usage"),
    [
        (Api.CHAT, {"messages": [], "stream": True}, True),
        (Api.CHAT, {"messages": []}, False),
        (Api.CHAT, {"messages": [], "stream": True, "stream_options": {"include_usage": True}}, False),
        (Api.COMPLETIONS, {"prompt": "x", "stream": True}, True),
        (Api.COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}, False),
        (Api.RESPONSES, {"input": "x", "stream": True}, False),
        (Api.MESSAGES, {"messages": [], "stream": True}, False),
    ],
)
def test_only_streams_that_report_when_asked_lack_usage(
    api: Api, body: dict[str, Any], lacks_usage: bool
) -> None:
    """Other dialects always report."""
    parser = FactsParser(KeySettings(), b"secret")
    facts = parser.parse(api, [], json.dumps({"model": "m", **body}).encode())
    assert facts.lacks_usage is lacks_usage


def test_options_of_a_body_read_in_part_are_seen() -> None:
    """Of one with too many items to be read in full."""
    decoder = BodyDecoder((), max_items=0)
    body = {"model": "m", "messages": ["x" * (1 << 20)], "stream": True, "stream_options": {}}
    assert decoder.decode(Api.CHAT, json.dumps(body).encode()).stream_options == b"{}"
