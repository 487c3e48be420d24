"""What is remembered of a conversation changes no result: every turn parses as if it were the first."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire.talks import HEADER_SETS, WORDS, Talk, change, messages, move_markers

from gateway.errors import GatewayError
from gateway.values import Api, KeySource, RequestFacts
from gateway.wire.bodies import MAX_UNCOUNTED_BYTES
from gateway.wire.conversations import Conversations
from gateway.wire.facts import FactsParser
from gateway.wire.settings import KeySettings

HEADERS = [(b"host", b"h"), (b"x-session-id", b"s1")]


def outcome(parser: FactsParser, talk: Talk, body: bytes) -> RequestFacts | str:
    """What a request comes to: its facts, or how it is refused."""
    try:
        return parser.parse(talk.api, talk.headers, body, tenant=talk.tenant)
    except GatewayError as error:
        return repr((error, error.status, str(error)))


def remembering(**options: Any) -> FactsParser:
    return FactsParser(KeySettings(**options), b"s", min_remembered_bytes=1)


def forgetful(**options: Any) -> FactsParser:
    return FactsParser(KeySettings(**options, conversation_memo_bytes=0), b"s")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(), memo_bytes=st.sampled_from([1, 5_000, 1 << 20]), max_prefix=st.sampled_from([3, 9, 512])
)
def test_every_turn_parses_as_if_nothing_had_gone_before(
    data: st.DataObject, memo_bytes: int, max_prefix: int
) -> None:
    """Conversations of all dialects that grow, are edited, cut and damaged, interleaved; a small memory."""
    options: dict[str, Any] = {"max_prefix_messages": max_prefix, "cookie_name": "sid"}
    parser = remembering(**options, conversation_memo_bytes=memo_bytes)
    fresh = forgetful(**options)
    apis = st.sampled_from([Api.CHAT, Api.MESSAGES, Api.RESPONSES])
    talks = [
        Talk(
            data.draw(apis), headers=data.draw(HEADER_SETS), turns=data.draw(st.lists(messages(), max_size=9))
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    for _ in range(data.draw(st.integers(1, 14))):
        talk = data.draw(st.sampled_from(talks))
        body = change(data.draw, talk)
        assert outcome(parser, talk, body) == outcome(fresh, talk, body)


def conversation(num_turns: int) -> list[dict[str, Any]]:
    """A system prompt, then questions and answers by turns."""
    turns = [
        {"role": "user" if turn % 2 == 0 else "assistant", "content": f"{turn}: {WORDS * 3}"}
        for turn in range(num_turns)
    ]
    return [{"role": "system", "content": WORDS * 10}, *turns]


def chat(num_turns: int, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": conversation(num_turns)} | fields).encode()


@pytest.mark.parametrize("fields", [{}, {"session_id": "b"}, {"stream": True, "max_tokens": 5, "x": [1]}])
@pytest.mark.parametrize("headers", [HEADERS, HEADERS[:1]])
def test_one_other_byte_anywhere_is_seen(fields: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
    """A body of the same length with one byte changed, at every place of it."""
    parser, fresh = remembering(), forgetful()
    talk = Talk(Api.CHAT, headers=headers)
    known = chat(3, **fields)
    body = chat(5, **fields)
    for at in range(0, len(body), 3):
        outcome(parser, talk, known)
        other = body[:at] + (b"x" if body[at] != ord("x") else b"y") + body[at + 1 :]
        assert outcome(parser, talk, other) == outcome(fresh, talk, other)


MESSAGES = {
    "A": '{"role":"user","content":"a question that is long enough to be told from all the others"}',
    "B": '{"role":"user","content":"a position that is long enough to be told from all the others"}',
    "T": '{"role":"user","content":"### Task:\\nmake a title of this conversation, a short one"}',
    "Y": '{"role":"assistant","content":"yes"}',
    "M": '{"role":"user","content":[{"type":"text","text":"more","cache_control":{"type":"ephemeral"}}]}',
    "N": '{"role":"assistant","content":[{"type":"text","text":"ok","cache_control":{"type":"ephemeral"}}]}',
}


@pytest.mark.parametrize(
    ("known", "body"),
    [
        # what stands behind the messages
        ('{"messages":[A],"model":"m"}', '{"messages":[A],"model":"n"}'),
        ('{"messages":[A],"model":"m","tools":[{"name":"f"}]}', '{"messages":[A],"model":"m"}'),
        ('{"messages":[A],"model":"m"}', '{"messages":[A],"model":"m","tools":[{"name":"f"}]}'),
        ('{"messages":[A],"model":"m","system":"be"}', '{"messages":[A],"model":"m","system":"or"}'),
        ('{"messages":[A],"model":"m","session_id":"a"}', '{"messages":[A],"model":"m","session_id":"b"}'),
        ('{"messages":[A],"model":"m","stream":true}', '{"messages":[A],"model":"m","max_tokens":1}'),
        # values that do not end where they seem to
        ('{"model":"m","messages":[A,1]}', '{"model":"m","messages":[A,12,A]}'),
        ('{"model":"m","messages":[A,1]}', '{"model":"m","messages":[A,1.5,A]}'),
        # lists that are not the messages
        ('{"model":"m","messages":[A],"messages":[B]}', '{"model":"m","messages":[A]}'),
        ('{"model":"m","messages":[A],"messages":[A]}', '{"model":"m","messages":[A],"messages":[A,A]}'),
        ('{"model":"m","messages":[A]}', '{"model":"m","messages":[A],"messages":[null]}'),
        ('{"model":"m","messages":[A]}', '{"model":"m","messages":[A],"messages":[]}'),
        ('{"x":{"messages":[A]},"messages":[A],"model":"m"}', '{"x":{"messages":[A,A]},"messages":[A]}'),
        ('{"model":"m","messages":[A ,A,A]}', '{"model":"m","messages":[A ,A,A,A]}'),
        ('{"model":"m","messages":[A]}', '{"model":"m","messages":[A A]}'),
        ('{"model":"m","messages":[A]}', '{"model":"m","messages":[A,]}'),
        ('{"model":"m","messages":[A]}', '{"model":"m","messages":[A]'),
        ('{"model":"m","messages":[A]}', '{"model":"m","messages":[A]}}'),
        # what followed is gone
        ('{"model":"m","messages":[A,N]}', '{"model":"m","messages":[A,A]}'),
        ('{"model":"m","messages":[T,M]}', '{"model":"m","messages":[T]}'),
        ('{"model":"m","messages":[T]}', '{"model":"m","messages":[T,A]}'),
        ('{"model":"m","messages":[Y,M]}', '{"model":"m","messages":[Y,A]}'),
        ('{"model":"m","messages":[M,A,A,A,A,A]}', '{"model":"m","messages":[M]}'),
        ('{"model":"m","messages":[A,A,M,A,A,A,A]}', '{"model":"m","messages":[A,A,M,A]}'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("headers", [HEADERS, HEADERS[:1]])
@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES, Api.RESPONSES])
def test_what_only_looks_like_the_same_conversation(
    api: Api, headers: list[tuple[bytes, bytes]], known: str, body: str
) -> None:
    """A body that begins like the one before, but not with the same messages, or for somebody else."""
    parser, fresh = remembering(), forgetful()
    talk = Talk(api, headers=headers)
    name = '"input"' if api is Api.RESPONSES else '"messages"'
    for text in (known, body, known, body, body):
        text = re.sub(r"\b[ABTYMN]\b", lambda found: MESSAGES[found.group()], text).replace(
            '"messages"', name
        )
        assert outcome(parser, talk, text.encode()) == outcome(fresh, talk, text.encode())


class CountedFinds:
    """How many parses of a test went on from what was known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_found = 0
        find = Conversations.find

        def counted(memory: Conversations, request: Any) -> Any:
            found = find(memory, request)
            self.num_found += found is not None
            return found

        monkeypatch.setattr(Conversations, "find", counted)


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> CountedFinds:
    return CountedFinds(monkeypatch)


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES, Api.RESPONSES])
@pytest.mark.parametrize("name", ["header", "body", "fingerprint"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_growing_conversations_are_recognised(
    finds: CountedFinds, api: Api, name: str, separators: tuple[str, str]
) -> None:
    """In every dialect and with every kind of key; without a session header there must be an answer first."""
    parser = remembering()
    talk = Talk(api, headers=HEADERS if name == "header" else [], separators=separators)
    talk.fields |= {"session_id": "b"} if name == "body" else {}
    for num_turns in (1, 3, 5, 7, 9):
        talk.turns = conversation(num_turns)
        if api is not Api.CHAT:
            del talk.turns[0]
        facts = parser.parse(api, talk.headers, talk.body())
        assert facts.key_source is KeySource[name.upper()]
    assert finds.num_found == (4 if name == "header" else 3)


def test_claude_codes_moving_markers_are_recognised(finds: CountedFinds) -> None:
    """The messages before the marked ones stay as they were, so the prompt goes on from there."""
    parser, fresh = remembering(), forgetful()
    talk = Talk(Api.MESSAGES, headers=HEADERS)
    for num_turns in range(1, 30, 2):
        talk.turns = conversation(num_turns)[1:]
        move_markers(talk.turns, 3)
        assert outcome(parser, talk, talk.body()) == outcome(fresh, talk, talk.body())
    assert finds.num_found >= 11


def test_two_models_in_one_session_are_two_conversations(finds: CountedFinds) -> None:
    """A title made by a small model in between does not push the conversation out."""
    parser = remembering()
    for num_turns in (1, 3, 5, 7):
        parser.parse(Api.CHAT, HEADERS, chat(num_turns))
        parser.parse(Api.CHAT, HEADERS, chat(1, model="small"))
    assert finds.num_found == 6


def test_a_name_that_changes_is_read_anew() -> None:
    """Follow-ups name another answer in each turn."""
    parser = remembering()
    talk = Talk(Api.RESPONSES)
    keys = set()
    for turn in range(1, 5):
        talk.turns, talk.fields = (
            conversation(turn)[1:],
            {"model": "m", "previous_response_id": f"resp_{turn}"},
        )
        facts = parser.parse(Api.RESPONSES, [], talk.body())
        assert facts.answer_key == facts.session_key == parser.response_session_key("default", f"resp_{turn}")
        keys.add(facts.session_key)
    assert len(keys) == 4


def test_the_memory_is_bounded() -> None:
    """The oldest conversations go, and what is kept is counted right."""
    parser = remembering(conversation_memo_bytes=20_000)
    memory = parser._conversations
    for session in range(100):
        for num_turns in (1, 3):
            parser.parse(Api.CHAT, [(b"x-session-id", b"%d" % session)], chat(num_turns))
        assert memory._num_bytes == sum(known.num_bytes for known in memory._entries.values()) <= 20_000
    assert 5 < len(memory._entries) < 20


def test_an_entry_takes_no_more_than_it_is_counted_for() -> None:
    """The bound is one of memory; above all no entry keeps a body alive."""
    parser = remembering()
    bodies = [chat(31, session_id=f"b{number}", user="u" * 5_000) for number in range(200)]
    for body in bodies[:20]:
        parser.parse(Api.CHAT, [], body, tenant="warm")
    tracemalloc.start()
    try:
        before = parser._conversations._num_bytes
        for number, body in enumerate(bodies):
            headers = [(b"x-session-id", b"a header of some length %d" % number)]
            parser.parse(Api.CHAT, headers if number % 2 else [], bytes(bytearray(body)))
        del body, headers
        counted = parser._conversations._num_bytes - before
        assert tracemalloc.get_traced_memory()[0] <= counted <= 200 * 8_000
    finally:
        tracemalloc.stop()


def test_no_prompt_text_is_kept() -> None:
    """Only hashes, sizes and what names the session outlive a request."""
    parser = remembering()
    parser.parse(Api.CHAT, HEADERS, chat(3, session_id="b"))
    assert len(parser._conversations._entries) == 1
    assert "turn goes home" not in repr(parser._conversations._entries)


def test_small_and_huge_bodies_are_not_watched(finds: CountedFinds) -> None:
    """Below a size remembering costs more than it saves; above another one, items must be counted."""
    parser = FactsParser(KeySettings(), b"s")
    for body in (chat(1), chat(5), chat(5)):
        parser.parse(Api.CHAT, HEADERS, body)
    huge = {"role": "user", "content": "x" * MAX_UNCOUNTED_BYTES}
    body = json.dumps({"model": "m", "messages": [huge]}).encode()
    assert parser.parse(Api.CHAT, HEADERS, body) == parser.parse(Api.CHAT, HEADERS, body)
    assert finds.num_found == 0
