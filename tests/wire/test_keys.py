"""Which value becomes the session key: the order of sources, what counts as absent, and how it is hashed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.values import Api, KeySource, RequestFacts
from gateway.wire.facts import FactsParser
from gateway.wire.keys import KeyHasher, length_prefixed, session_part
from gateway.wire.settings import KeySettings

Parse = Callable[..., RequestFacts]

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LONG_TURN = {"role": "user", "content": "a first question that is long enough to tell conversations apart"}


def test_one_id_gives_one_key_wherever_it_stands(parse: Parse) -> None:
    """Header, body and every API agree on the key of an id, so a mixed client keeps its home."""
    key = parse(CHAT, {"x-session-id": "abc"}).session_key
    assert key is not None
    assert len(key) == 32
    others = [
        parse(CHAT, {"X-SESSION-ID": " abc "}),
        parse(CHAT, {"x-claude-code-session-id": '"abc"'}),
        parse(CHAT | {"session_id": "abc"}),
        parse(CHAT | {"metadata": {"session_id": "abc"}}),
        parse({"model": "m", "prompt": "x", "session_id": "abc"}, api=Api.COMPLETIONS),
        parse({"model": "m", "input": "x"}, {"x-session-id": "abc"}, api=Api.RESPONSES),
        parse({"model": "m", "input": "x"}, {"x-session-id": "abc"}, api=Api.EMBEDDINGS),
        parse(CHAT, {"x-session-id": "abc"}, api=Api.MESSAGES),
    ]
    assert {facts.session_key for facts in others} == {key}


def test_keys_are_scoped_by_tenant_model_and_secret(parse: Parse) -> None:
    """Equal ids of two tenants, of two models, or under two secrets have nothing in common."""
    headers = {"x-session-id": "abc"}
    keys = {
        parse(CHAT, headers).session_key,
        parse(CHAT, headers, tenant="other").session_key,
        parse(CHAT | {"model": "n"}, headers).session_key,
    }
    other_secret = FactsParser(KeySettings(), b"another")
    keys.add(other_secret.parse(Api.CHAT, [(b"x-session-id", b"abc")], _json(CHAT)).session_key)
    assert len(keys) == 4


def test_switching_the_model_and_back_finds_the_old_session(parse: Parse) -> None:
    """A model switch in mid-session is another key (other weights, other cache), the way back the old one."""
    headers = {"x-session-id": "abc"}
    first, second, third = (parse(CHAT | {"model": model}, headers) for model in ("a", "b", "a"))
    assert first.session_key == third.session_key != second.session_key


@pytest.mark.parametrize("name", KeySettings().headers)
def test_every_alias_names_a_session(parse: Parse, name: str) -> None:
    """A client that speaks to any other gateway is understood unchanged."""
    facts = parse(CHAT, {name.title(): "abc"})
    assert (facts.key_source, facts.obeys_load_bound) == (KeySource.HEADER, False)
    assert facts.session_key == parse(CHAT, {"x-session-id": "abc"}).session_key


@pytest.mark.parametrize(
    "name",
    ["x-request-id", "traceparent", "x-trace-id", "x-client-request-id", "idempotency-key", "authorization",
     "x-forwarded-for", "x-correlation-id", "x-user-id", "x-openwebui-user-id", "x-continue-unique-id",
     "x-stainless-retry-count"],
)  # fmt: skip
def test_ids_of_requests_and_people_are_no_sessions(parse: Parse, name: str) -> None:
    """Headers that change per request, or that a whole office shares, never make a key."""
    assert parse(CHAT, {name: "3f1c8ad2"}).key_source is KeySource.NONE


def test_fresh_request_ids_beside_a_session_id_change_nothing(parse: Parse) -> None:
    """Six turns, each with new request, trace and client ids: one key."""
    keys = {
        parse(CHAT, {"x-request-id": f"r{turn}", "traceparent": f"t{turn}", "x-session-id": "s",
                     "x-client-request-id": f"c{turn}"}).session_key
        for turn in range(6)
    }  # fmt: skip
    assert len(keys) == 1


def test_the_order_of_sources_is_the_documented_one(parse: Parse) -> None:
    """Header, body, response id, cache bucket, fingerprint: taking one away uncovers the next."""
    body = {
        "model": "m",
        "messages": [LONG_TURN],
        "session_id": "body",
        "previous_response_id": "resp_1",
        "prompt_cache_key": "bucket",
    }
    assert parse(body, {"x-session-id": "header"}).key_source is KeySource.HEADER
    assert parse(body).key_source is KeySource.BODY
    del body["session_id"]
    assert parse(body).key_source is KeySource.RESPONSE_ID
    del body["previous_response_id"]
    assert parse(body).key_source is KeySource.PROMPT_CACHE_KEY
    del body["prompt_cache_key"]
    assert parse(body).key_source is KeySource.FINGERPRINT
    assert parse(body | {"messages": []}).key_source is KeySource.NONE


def test_the_order_of_sources_can_be_changed() -> None:
    """An operator may prefer the body, or leave a source out."""
    settings = KeySettings(sources=("body", "header"))
    parser = FactsParser(settings, b"s")
    body = _json(CHAT | {"session_id": "b", "prompt_cache_key": "p", "messages": [LONG_TURN]})
    headers = [(b"x-session-id", b"h")]
    assert parser.parse(Api.CHAT, headers, body).key_source is KeySource.BODY
    plain = _json(CHAT | {"prompt_cache_key": "p", "messages": [LONG_TURN]})
    assert parser.parse(Api.CHAT, [], plain).key_source is KeySource.NONE


def test_own_body_fields_and_cookie_can_be_configured() -> None:
    """Any top-level field or member, and one cookie, can name the session."""
    settings = KeySettings(body_fields=("extra.thread", "chat"), cookie_name="sid")
    parser = FactsParser(settings, b"s")
    bodies = [CHAT | {"extra": {"thread": "abc"}}, CHAT | {"chat": "abc", "extra": "x"}]
    keys = {parser.parse(Api.CHAT, [], _json(body)).session_key for body in bodies}
    cookies = [(b"Cookie", b"a=1; sid=abc; b=2"), (b"Cookie", b"sid=later")]
    by_cookie = parser.parse(Api.CHAT, cookies, _json(CHAT))
    assert by_cookie.key_source is KeySource.COOKIE
    assert keys == {by_cookie.session_key}


@pytest.mark.parametrize(
    "value",
    ["{{LIBRECHAT_BODY_CONVERSATIONID}}", "{{CHAT_ID}}", "{{ CHAT_ID }}", "${SESSION}", "<session-id>",
     "%SESSION%", "$SESSION", "{session.id}", "undefined", "null", "None", "NULL", "NaN", "new", "default",
     "0", "-", "[object Object]", "00000000-0000-0000-0000-000000000000", "", " ", "\t", '""', '" "', "true"],
)  # fmt: skip
def test_unfilled_templates_and_script_leftovers_are_absent(parse: Parse, value: str) -> None:
    """They would put every user on one backend; the next usable source wins instead."""
    assert parse(CHAT, {"x-session-id": value}).key_source is KeySource.NONE
    assert parse(CHAT | {"session_id": value}).key_source is KeySource.NONE
    fallback = parse(CHAT | {"session_id": "real"}, {"x-session-id": value})
    assert fallback.key_source is KeySource.BODY


def test_of_two_codex_spellings_the_hyphen_wins(parse: Parse) -> None:
    """`session-id` and `session_id` may differ; the rank decides, not the order of arrival."""
    hyphen = parse(CHAT, {"session-id": "a"}).session_key
    assert parse(CHAT, {"session_id": "b", "session-id": "a"}).session_key == hyphen
    assert parse(CHAT, {"session-id": "a", "session_id": "b"}).session_key == hyphen
    assert parse(CHAT, {"session_id": "b"}).session_key != hyphen


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ("user_0a1b_account_c2_session_54c1eb09-bc4c", "54c1eb09-bc4c"),
        ('{"device_id":"d","account_uuid":"","session_id":"54c1eb09-bc4c"}', "54c1eb09-bc4c"),
        ({"device_id": "d", "session_id": "54c1eb09-bc4c"}, "54c1eb09-bc4c"),
        ('{"device_id":"d","session_id":', None),
        ('{"device_id":"d"}', None),
        ({"device_id": "d"}, None),
        ('{"session_id":7}', None),
        ("alice@example.com", None),
        ("user_0a1b_account_c2", None),
        (12, None),
        (None, None),
    ],
)
def test_only_the_session_part_of_anthropics_user_id_counts(
    parse: Parse, user_id: object, session: str | None
) -> None:
    """Account and device in `metadata.user_id` never make or change a key."""
    assert session_part(_json(user_id)) == session
    facts = parse(CHAT | {"metadata": {"user_id": user_id}}, api=Api.MESSAGES)
    expected = None if session is None else parse(CHAT, {"x-session-id": session}).session_key
    assert facts.session_key == expected


def test_sub_agents_have_keys_of_their_own(parse: Parse) -> None:
    """A thread inside a Codex session, or an agent inside a Claude Code session, is its own conversation."""
    main = parse(CHAT, {"session-id": "s", "thread-id": "s"}).session_key
    child = parse(CHAT, {"session-id": "s", "thread-id": "t"}).session_key
    assert main != child
    assert child == parse(CHAT, {"session-id": "s", "thread-id": "t"}).session_key
    agents = [
        parse(CHAT, {"x-claude-code-session-id": "s"} | ({"x-claude-code-agent-id": agent} if agent else {}))
        for agent in ("", "1", "2", "1")
    ]
    keys = [facts.session_key for facts in agents]
    assert keys[1] == keys[3]
    assert len(set(keys)) == 3


def test_compaction_changes_the_opener_but_not_a_named_session(parse: Parse) -> None:
    """A client that rewrites its early messages keeps its home if it names its session."""
    compacted = {
        "role": "user",
        "content": "Summary of the conversation so far: the user wants a pony, a red one.",
    }
    before, after = (CHAT | {"messages": [turn]} for turn in (LONG_TURN, compacted))
    named = {parse(body, {"x-session-id": "s"}).session_key for body in (before, after)}
    assert len(named) == 1
    assert parse(before).session_key != parse(after).session_key


def test_auxiliary_calls_follow_but_never_bind(parse: Parse) -> None:
    """Title and tag calls of a chat carry its key and are marked, by header or by their opening."""
    chat = {"x-openwebui-chat-id": "c"}
    turn = parse(CHAT, chat)
    by_header = parse(CHAT, chat | {"x-openwebui-task": "title_generation"})
    task = {"role": "user", "content": "### Task:\nGenerate a concise title for the chat."}
    by_prompt = parse(CHAT | {"messages": [task]}, chat)
    unfilled = parse(CHAT, chat | {"x-openwebui-task": "{{TASK}}"})
    assert {facts.session_key for facts in (by_header, by_prompt, unfilled)} == {turn.session_key}
    assert [f.sets_binding for f in (turn, by_header, by_prompt, unfilled)] == [True, False, False, True]


def test_a_conversation_that_only_mentions_the_marker_still_binds(parse: Parse) -> None:
    """The opening of an auxiliary prompt counts only where it is the whole prompt."""
    messages = [
        {"role": "user", "content": "### Task:\nwrite a poem"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "again"},
    ]
    assert parse(CHAT | {"messages": messages}).sets_binding


@pytest.mark.parametrize("length", [1, 255, 256])
def test_ids_up_to_the_limit_are_used(parse: Parse, length: int) -> None:
    """256 bytes is the documented limit."""
    assert parse(CHAT, {"x-session-id": "x" * length}).key_source is KeySource.HEADER


@pytest.mark.parametrize("length", [257, 8190, 1 << 20])
def test_longer_ids_are_absent(parse: Parse, length: int) -> None:
    """Beyond the limit an id is not cut or hashed: it does not count, in headers and bodies alike."""
    assert parse(CHAT, {"x-session-id": "x" * length}).key_source is KeySource.NONE
    assert parse(CHAT | {"session_id": "x" * length}).key_source is KeySource.NONE


def test_repeated_joined_and_foreign_header_values_are_stable(parse: Parse) -> None:
    """The first of two values counts; commas and non-ASCII bytes are part of an id."""
    first = parse(CHAT, {"x-session-id": "a"}).session_key
    assert parse(CHAT, [(b"x-session-id", b"a"), (b"X-Session-Id", b"b")]).session_key == first
    assert parse(CHAT, [(b"x-session-id", b""), (b"X-Session-Id", b"a")]).session_key == first
    assert parse(CHAT, {"x-session-id": "a, b"}).session_key != first
    raw = parse(CHAT, [(b"x-session-id", b"caf\xc3\xa9\xff")])
    assert raw.key_source is KeySource.HEADER
    assert (
        parse(CHAT, {"x-session-id": "café"}).session_key == parse(CHAT | {"session_id": "café"}).session_key
    )


def test_an_sdk_retry_has_the_key_of_the_first_attempt(parse: Parse) -> None:
    """`x-stainless-retry-count` does not make another request of it."""
    body = CHAT | {"messages": [LONG_TURN]}
    first = parse(body, {"x-stainless-retry-count": "0"})
    assert parse(body, {"x-stainless-retry-count": "1"}) == first


@pytest.mark.parametrize(
    "value", ["123", "true", "1.5", "null", "[]", "{}", '{"a":1}', '["abc"]', "-0", "1e5", '{"id":7}']
)
def test_values_that_are_no_strings_are_no_ids(parse: Parse, value: str) -> None:
    """They are ignored, never turned into the key "None" or "123"."""
    for field in ("session_id", "conversation", "previous_response_id", "prompt_cache_key", "metadata"):
        body = b'{"model":"m","messages":[],"%b":%b}' % (field.encode(), value.encode())
        assert parse(body).key_source is KeySource.NONE


@pytest.mark.parametrize(
    "escaped", [r"\ud83d", r"\ude00", r"a\u0000b", r"\ud83d\ude00", r"\u202eabc", r"a\r\nb"]
)
def test_odd_strings_make_stable_keys(parse: Parse, escaped: str) -> None:
    """Half surrogate pairs, NUL, line breaks and emoji are ids like any other, the same on every replica."""
    body = b'{"model":"m","messages":[],"session_id":"id-%b"}' % escaped.encode()
    first = parse(body)
    assert first.key_source is KeySource.BODY
    assert parse(body).session_key == first.session_key


def test_a_repeated_field_counts_with_its_last_value(parse: Parse) -> None:
    """As in the parsers of the engines."""
    body = b'{"model":"m","session_id":"a","session_id":"b","messages":[]}'
    facts = parse(body)
    assert facts.model == "m"
    assert facts.session_key == parse(CHAT, {"x-session-id": "b"}).session_key


def test_conversation_is_read_as_string_and_as_object(parse: Parse) -> None:
    """Both forms of the Responses API name the same session."""
    text, wrapped = (
        parse({"model": "m", "input": "x", "conversation": value}, api=Api.RESPONSES)
        for value in ("conv_1", {"id": "conv_1"})
    )
    assert text.session_key == wrapped.session_key
    assert text.key_source is KeySource.BODY


def test_follow_ups_of_a_response_share_the_key_of_its_id(parser: FactsParser, parse: Parse) -> None:
    """`previous_response_id`, GET, DELETE and cancel all ask under the key that is bound with the answer."""
    key = parser.response_session_key("default", "resp_1")
    follow_up = parse({"model": "m", "input": "x", "previous_response_id": "resp_1"}, api=Api.RESPONSES)
    stored = [
        parse(b"", {"x-session-id": "other"}, api=Api.RESPONSES, path=path)
        for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/cancel")
    ]
    assert {facts.session_key for facts in (follow_up, *stored)} == {key}
    assert {facts.key_source for facts in (follow_up, *stored)} == {KeySource.RESPONSE_ID}
    assert [facts.sets_binding for facts in (follow_up, *stored)] == [True, False, False]
    assert follow_up.is_follow_up
    assert parser.response_session_key("tenant", "resp_1") != key


def test_a_cache_bucket_is_no_session(parse: Parse) -> None:
    """`prompt_cache_key` groups, obeys the load bound, and differs from a session of the same name."""
    facts = parse(CHAT | {"prompt_cache_key": "abc"})
    assert facts.obeys_load_bound
    assert facts.session_key not in (None, parse(CHAT, {"x-session-id": "abc"}).session_key)


def test_without_any_key_nothing_is_invented(parse: Parse) -> None:
    """No id, no system prompt, nothing to tell apart: no key at all, never a constant one."""
    for system in ({}, {"role": "system", "content": ""}, {"role": "system", "content": " \n"}):
        messages = ([system] if system else []) + [{"role": "user", "content": "hi"}]
        facts = parse(CHAT | {"messages": messages}, {"x-session-id": " "})
        assert (facts.session_key, facts.prompt_key, facts.key_source) == (None, None, KeySource.NONE)
        assert not facts.obeys_load_bound


def test_distinct_system_prompts_make_distinct_groups(parse: Parse) -> None:
    """50 system prompts and no session id: 50 groups, each obeying the load bound."""
    groups = [
        parse(CHAT | {"messages": [{"role": "system", "content": f"You are bot {i}"}, CHAT["messages"][0]]})
        for i in range(50)
    ]
    assert len({facts.prompt_key for facts in groups}) == 50
    assert {(f.key_source, f.session_key, f.obeys_load_bound) for f in groups} == {
        (KeySource.PROMPT_GROUP, None, True)
    }


def test_the_fingerprint_holds_through_a_conversation(parse: Parse) -> None:
    """Later turns have the key of the first; another opening, system prompt, tool list or model has not."""
    system = {"role": "system", "content": "s"}
    opening: dict[str, Any] = CHAT | {"messages": [system, LONG_TURN]}
    answer = {"role": "assistant", "content": "a"}
    later = CHAT | {"messages": [system, LONG_TURN, answer, {"role": "user", "content": "more"}]}
    first = parse(opening)
    assert (first.key_source, first.obeys_load_bound) == (KeySource.FINGERPRINT, True)
    assert parse(later).session_key == first.session_key
    other_turn = {"role": "user", "content": "quite another first question, also long enough to tell"}
    others = [
        parse(opening | {"messages": [system, other_turn]}),
        parse(opening | {"messages": [{"role": "system", "content": "t"}, LONG_TURN]}),
        parse(opening | {"tools": [{"type": "function"}]}),
        parse(opening | {"model": "n"}),
        parse(opening, tenant="t"),
    ]
    assert len({facts.session_key for facts in [first, *others]}) == 6


def test_every_byte_of_a_long_secret_counts() -> None:
    """A secret beyond the 64 bytes that the hash takes is not cut."""
    one, two = (KeyHasher(b"x" * 64 + tail) for tail in (b"a", b"b"))
    assert one.response_key("t", b"r") != two.response_key("t", b"r")


def test_the_memo_of_models_is_bounded_and_changes_no_key() -> None:
    """Model names come from clients; a thousand invented ones leave no more than the limit behind."""
    hasher, fresh = KeyHasher(b"s", max_scopes=10), KeyHasher(b"s")
    for number in range(1_000):
        assert hasher.scope("t", f"m{number}") == fresh.scope("t", f"m{number}")
        assert len(hasher._scopes) <= 10
    assert hasher.scope("t", None) == hasher.scope("t", "")


@given(left=st.lists(st.binary(max_size=12)), right=st.lists(st.binary(max_size=12)))
def test_length_prefixes_are_unambiguous(left: list[bytes], right: list[bytes]) -> None:
    """Two lists of parts have the same encoding only if they are the same list."""
    assert (length_prefixed(*left) == length_prefixed(*right)) == (left == right)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
