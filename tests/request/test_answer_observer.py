"""What an answer tells while it passes: the first token at once, the rest whenever it is asked for."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request.answer_observer import BATCH_BYTES, AnswerObserver
from gateway.values import Api

USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


def event(content: str = "", finish_reason: str | None = None, **fields: object) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish_reason}
    return b"data: %b\n\n" % json.dumps({"id": "chat-1", "choices": [choice]} | fields).encode()


STREAM = b"".join(
    [
        event(),
        *[event(f"token {number} ") for number in range(3 * BATCH_BYTES // 100)],
        event("", "stop"),
        event("", usage=USAGE),
        b"data: [DONE]\n\n",
    ]
)


def observer(told: list[str], *, is_stream: bool = True, limit_bytes: int = 0) -> AnswerObserver:
    return AnswerObserver(
        Api.CHAT, is_stream=is_stream, limit_bytes=limit_bytes, on_first_token=lambda: told.append("first")
    )


def test_the_first_token_is_told_at_once_and_once() -> None:
    """With the event that brings it, not with the batch that it opens; events before it bring none."""
    told: list[str] = []
    watching = observer(told)
    watching.feed(event())
    assert told == []
    watching.feed(event("Hello"))
    assert told == ["first"]
    watching.feed(event(" world"))
    watching.finish()
    assert told == ["first"]


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_cuts_change_nothing(cuts: list[int]) -> None:
    """However a stream comes in pieces, its end tells usage, reason and id."""
    bounds = [0, *sorted(cuts), len(STREAM)]
    watching = observer([])
    for begin, end in itertools.pairwise(bounds):
        watching.feed(STREAM[begin:end])
    assert watching.is_complete
    watching.finish()
    assert watching.usage is not None
    assert (watching.usage.prompt_tokens, watching.usage.completion_tokens) == (7, 3)
    assert (watching.finish_reason, watching.response_id) == ("stop", "chat-1")


def test_who_asks_in_the_middle_of_a_batch_gets_the_present_state() -> None:
    """Whether an event is cut, and whether the stream has said its end, is known to the last byte."""
    watching = observer([])
    watching.feed(event("Hello"))
    assert not watching.is_mid_event
    watching.feed(event(" world")[:20])
    assert watching.is_mid_event
    watching.feed(event(" world")[20:])
    assert not watching.is_mid_event
    assert not watching.is_complete
    watching.feed(b"data: [DONE]\n\n")
    assert watching.is_complete


@pytest.mark.parametrize(("spare_bytes", "is_read"), [(0, True), (-1, False)])
def test_a_json_answer_is_read_up_to_its_limit(spare_bytes: int, is_read: bool) -> None:
    """One byte too long, in however many pieces, and its usage is unknown, not zero."""
    answer = json.dumps({"id": "chat-1", "usage": USAGE}).encode()
    watching = observer([], is_stream=False, limit_bytes=len(answer) + spare_bytes)
    for begin in range(0, len(answer), 10):
        watching.feed(answer[begin : begin + 10])
    watching.finish()
    assert (watching.usage is not None) is is_read
    assert watching.response_id == ("chat-1" if is_read else None)
