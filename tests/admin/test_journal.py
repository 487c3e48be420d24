"""The journal: what one replica remembers of sessions and prompt groups, in bounds."""

from __future__ import annotations

from typing import cast

import pytest

from gateway.downstream.request import ClientRequest
from gateway.request.answer_observer import AnswerObserver
from gateway.request.journal import LAST_TURN_BUCKET, MAX_MOVES_KEPT, MAX_TURNS_KEPT, Journal, Story
from gateway.request.turn import Placement, Turn, TurnOutcome
from gateway.values import (
    Affinity,
    Api,
    BackendId,
    Binding,
    Decision,
    KeySource,
    PromptKey,
    RequestFacts,
    SessionKey,
    Usage,
)
from gateway.wire.routes import Route


def finished(
    session: str = "s",
    backend: str = "b0",
    *,
    affinity: Affinity = Affinity.HIT,
    num_before: int = 1,
    usage: Usage | None = None,
    ttft_s: float | None = None,
    group: str | None = None,
) -> Turn:
    """A turn as it looks at step 7."""
    observer = AnswerObserver(Api.CHAT, is_stream=False, limit_bytes=0, on_first_token=lambda: None)
    observer.usage = usage
    decision = Decision(
        backend_id=BackendId(backend),
        affinity=affinity,
        reason="home",
        ranked=(),
        key_source=KeySource.HEADER,
    )
    return Turn(
        request=cast("ClientRequest", None),  # nothing of it is recorded
        route=Route(api=Api.CHAT, path="/v1/chat/completions"),
        request_id="r",
        engine_request_id="r",
        started_s=0.0,
        facts=RequestFacts(
            api=Api.CHAT,
            session_key=SessionKey(session),
            key_source=KeySource.HEADER,
            prompt_key=None if group is None else PromptKey(group),
        ),
        placement=Placement(
            decision=decision,
            affinity=affinity,
            binding=Binding(backend_id=BackendId(backend), epoch=1, num_turns=num_before),
        ),
        outcome=TurnOutcome(status=200, first_token_s=ttft_s, observer=observer),
    )


def moved(backend: str, before: str, reason: str) -> Turn:
    turn = finished(backend=backend, affinity=Affinity.MOVED)
    turn.placement.moved_from, turn.placement.moved_reason = BackendId(before), reason
    return turn


def story_of(journal: Journal, session: str = "s") -> Story:
    story = journal.story(SessionKey(session))
    assert story is not None
    return story


def test_a_session_adds_up() -> None:
    """Turns, tokens and the share found in caches; a turn without usage counts as a turn only."""
    journal = Journal(10)
    journal.note(finished(usage=Usage(prompt_tokens=100, cached_tokens=0)), 1.0)
    journal.note(finished(usage=Usage(prompt_tokens=300, cached_tokens=200)), 2.0)
    journal.note(finished(usage=Usage(prompt_tokens=300)), 3.0)
    story = story_of(journal)
    assert (story.num_turns, story.prompt_tokens, story.cached_tokens) == (3, 400, 200)
    assert (story.first_seen_s, story.last_seen_s) == (1.0, 3.0)


def test_moves_are_kept_with_their_reasons() -> None:
    """A move names where from, where to and why; also one whose session was not known before."""
    journal = Journal(10)
    journal.note(moved("b1", "b0", "home_down"), 1.0)
    journal.note(finished(backend="b1"), 2.0)
    journal.note(moved("b2", "b1", "home_draining"), 3.0)
    assert [row[2:] for row in story_of(journal).moves] == [
        ("b0", "b1", "home_down"),
        ("b1", "b2", "home_draining"),
    ]
    assert len(journal.recent_moves) == 2


def test_a_home_changed_elsewhere_shows_as_rebound() -> None:
    """Another replica, or a hand-over, moved the session: the next turn here tells."""
    journal = Journal(10)
    journal.note(finished(backend="b0"), 1.0)
    journal.note(finished(backend="b1"), 2.0)
    assert [row[2:] for row in story_of(journal).moves] == [("b0", "b1", "rebound")]


def test_a_turn_served_away_from_home_for_once_is_no_move() -> None:
    """With the store away a request is placed by the ring and nothing is bound."""
    journal = Journal(10)
    journal.note(finished(backend="b0"), 1.0)
    journal.note(finished(backend="b1", affinity=Affinity.UNPINNED), 2.0)
    assert not story_of(journal).moves


def test_an_order_is_a_move_and_the_next_turn_no_second_one() -> None:
    """What an operator moves is told once."""
    journal = Journal(10)
    journal.note(finished(backend="b0"), 1.0)
    journal.note_move(SessionKey("s"), BackendId("b0"), BackendId("b1"), "operator", 2.0)
    journal.note(finished(backend="b1"), 3.0)
    assert [row[4] for row in story_of(journal).moves] == ["operator"]


def test_everything_is_bounded() -> None:
    """Sessions by last use; turns and moves of one session by number."""
    journal = Journal(3)
    for number in range(100):
        journal.note(finished(session=f"s{number}", group=f"g{number}"), float(number))
    assert len(journal) == 3
    assert [story.key for story in journal.recent(10)] == ["s99", "s98", "s97"]
    for number in range(100):
        journal.note(moved(f"b{number}", f"b{number - 1}", "home_down"), 200.0 + number)
    story = story_of(journal)
    assert (len(story.turns), len(story.moves)) == (MAX_TURNS_KEPT, MAX_MOVES_KEPT)


def test_sessions_are_found_by_the_beginning_of_their_key() -> None:
    """As the access log shows it."""
    journal = Journal(10)
    for name in ("abc1", "abc2", "xyz"):
        journal.note(finished(session=name), 1.0)
    assert [story.key for story in journal.starting_with("abc", 10)] == ["abc2", "abc1"]


def test_hot_groups_are_those_of_late() -> None:
    """Many requests long ago weigh less than some now."""
    journal = Journal(10)
    for _ in range(50):
        journal.note(finished(group="old"), 0.0)
    for _ in range(5):
        journal.note(finished(group="new"), 3600.0)
    assert [group.key for group in journal.hottest(3600.0, 2)] == ["new", "old"]
    old = journal.group(PromptKey("old"))
    assert old is not None
    assert old.heat_at(600.0) == pytest.approx(25.0)


@pytest.mark.parametrize(
    ("usage", "samples"),
    [
        (Usage(prompt_tokens=100, cached_tokens=90), "ttft_hit_s"),
        (Usage(prompt_tokens=100, cached_tokens=10), "ttft_cold_s"),
        (Usage(prompt_tokens=100), "ttft_unknown_s"),
        (None, "ttft_unknown_s"),
    ],
)
def test_first_tokens_are_sorted_by_what_the_cache_held(usage: Usage | None, samples: str) -> None:
    """A prompt mostly in cache is a hit; what an engine does not report is unknown, not cold."""
    journal = Journal(10)
    journal.note(finished(num_before=2, usage=usage, ttft_s=0.25), 1.0)
    assert list(getattr(journal.by_turn[2], samples)) == [0.25]


def test_late_turns_share_the_last_bucket() -> None:
    """The curve has an end, whatever the length of a session."""
    journal = Journal(10)
    journal.note(finished(num_before=10_000), 1.0)
    assert journal.by_turn[LAST_TURN_BUCKET - 1].num_turns == 1
