"""Clients as they talk, read by the parser: which header or field is the key, and what never is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.client_shapes import APIS, Client, Conversation
from fakes.client_table import CLIENTS

from gateway.values import KeySource, RequestFacts
from gateway.wire import defaults

Parse = Callable[..., RequestFacts]

NAMED = [name for name, client in CLIENTS.items() if client.has_id]

NOTHING: dict[str, Any] = {"model": "m", "messages": []}


def _read(parse: Parse, client: Client, headers: dict[str, str], body: dict[str, Any]) -> RequestFacts:
    return parse(body, headers, api=APIS[client.path], path=client.path)


def _turns(parse: Parse, client: Client, session: str, agent: str | None = None) -> list[RequestFacts]:
    """Return the facts of twelve turns; the fifth is asked twice, the ninth follows a compaction."""
    talk = Conversation(client, session, agent=agent)
    facts = []
    for number in range(12):
        if number == 8 and client.has_id:
            talk.compact()
        facts.append(_read(parse, client, *talk.ask()))
        if number == 4:
            facts.append(_read(parse, client, *talk.again(num_retries=1)))
        talk.hear()
    return facts


@pytest.mark.parametrize("name", CLIENTS)
def test_all_turns_of_a_conversation_have_one_key(parse: Parse, name: str) -> None:
    """N19: the same key from the same source, through retries and compaction; each turn may bind."""
    facts = _turns(parse, CLIENTS[name], "session-1")[CLIENTS[name].num_unnamed :]
    assert {one.key_source.value for one in facts} == {CLIENTS[name].source}
    assert len({one.session_key for one in facts}) == 1
    assert all(one.sets_binding for one in facts)


@pytest.mark.parametrize("name", NAMED)
def test_another_conversation_of_the_same_person_has_another_key(parse: Parse, name: str) -> None:
    """Ids of persons, machines and projects are the same in both and name neither."""
    first, second = (_turns(parse, CLIENTS[name], session)[0] for session in ("session-1", "session-2"))
    assert first.session_key != second.session_key


@pytest.mark.parametrize("name", [name for name in CLIENTS if CLIENTS[name].agent is not None])
def test_a_sub_agent_has_a_key_of_its_own(parse: Parse, name: str) -> None:
    """Its prompt shares nothing with its parent's, whose home it would only make fuller."""
    client = CLIENTS[name]
    keys = {one.session_key for one in _turns(parse, client, "session-1", "agent-1")}
    assert len(keys) == 1
    assert not keys & {one.session_key for one in _turns(parse, client, "session-1", "agent-2")}
    assert not keys & {one.session_key for one in _turns(parse, client, "session-1")}


def test_every_known_header_is_in_the_documentation() -> None:
    """A row for whoever looks for his client, or for what a header does to him."""
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text().lower()
    known = (*defaults.SESSION_HEADERS, *defaults.HEADER_QUALIFIERS, *defaults.SESSION_BODY_FIELDS)
    assert [name for name in known if f"`{name.lower()}`" not in page] == []


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("thread-id", "session-id"),
        ("x-amp-thread-id", "session_id"),
        ("x-thread-id", "x-claude-code-session-id"),
        ("x-session-id", "x-session-affinity"),
        ("x-openwebui-chat-id", "x-session-affinity"),
        ("agent-session-id", "x-litellm-trace-id"),
        ("x-session-affinity", "x-litellm-trace-id"),
        ("session_id", "x-client-session-id"),
    ],
)
def test_the_narrower_id_wins_whatever_comes_first(parse: Parse, better: str, worse: str) -> None:
    """A thread before its session; what may be one per process or per request last."""
    alone = parse(NOTHING, {better: "a"}).session_key
    assert parse(NOTHING, {better: "a", worse: "b"}).session_key == alone
    assert parse(NOTHING, {worse: "b", better: "a"}).session_key == alone


def test_ids_of_requests_persons_and_machines_are_no_keys(parse: Parse) -> None:
    """All of them at once name no session."""
    assert not defaults.NEVER_A_SESSION & {*defaults.SESSION_HEADERS, *defaults.HEADER_QUALIFIERS}
    facts = parse(NOTHING | {"user": "u"}, dict.fromkeys(sorted(defaults.NEVER_A_SESSION), "some-id"))
    assert (facts.session_key, facts.key_source) == (None, KeySource.NONE)


@pytest.mark.parametrize(
    ("value", "sets_binding"),
    [("main", True), ("subagent", True), ("compaction", True), ("auxiliary", False), ("Auxiliary", False)],
)
def test_only_one_class_of_claude_code_requests_is_auxiliary(
    parse: Parse, value: str, sets_binding: bool
) -> None:
    """The header comes with every request; its value tells."""
    headers = {"x-claude-code-session-id": "s", "x-claude-code-request-class": value}
    facts = parse({"model": "m", "messages": [{"role": "user", "content": "hi"}]}, headers)
    assert (facts.sets_binding, facts.key_source) == (sets_binding, KeySource.HEADER)


@pytest.mark.parametrize(
    ("fields", "sets_binding"),
    [
        ({"max_tokens": 1}, False),
        ({"max_tokens": 1, "tools": [{"name": "f", "input_schema": {}}]}, False),
        ({"max_tokens": 2}, True),
        ({}, True),
        ({"max_tokens": 1, "messages": [{"role": "user", "content": "A, B or C? " * 40}]}, True),
        (
            {
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "y"},
                    {"role": "user", "content": "z"},
                ],
            },
            True,
        ),
    ],
)
def test_a_word_sent_for_one_token_is_a_probe(
    parse: Parse, fields: dict[str, Any], sets_binding: bool
) -> None:
    """Claude Code asks so for its quota and for the size of a tool; long questions and talks are turns."""
    body = {"model": "m", "messages": [{"role": "user", "content": "quota"}]} | fields
    assert parse(body, {"x-session-id": "s"}).sets_binding is sets_binding
