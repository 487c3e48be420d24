"""What engines report of their caches, joined with what the router has sent."""

from __future__ import annotations

from routing.routing_worlds import chain

from gateway.replay.reported_content import CompletedContent
from gateway.routing.shadow import Shadow


def test_reported_content_is_completed_by_what_was_sent() -> None:
    """Per backend the longer of both prefixes counts."""
    reported, sent = Shadow(100), Shadow(100)
    for index in (reported, sent):
        index.set_capacity(0, 100)
        index.set_capacity(1, 100)
    prompt = chain("system", "question", size=5)
    reported.insert(0, prompt)
    sent.insert(1, prompt[:1])
    sent.insert(0, prompt[:1])
    joined = CompletedContent(reported, sent)
    assert joined.levels(prompt) == [((0,), 10), ((1,), 5)]
    assert [joined.cached_bytes(slot, prompt) for slot in (0, 1)] == [10, 5]
