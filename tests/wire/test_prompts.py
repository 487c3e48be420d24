"""Prompts: which system prompts are the same group, what volatile text is, and what a shared prefix is."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.values import Api, KeySource, RequestFacts
from gateway.wire.facts import FactsParser
from gateway.wire.normalise import TextNormaliser, canonical_message
from gateway.wire.settings import KeySettings, Normaliser

Parse = Callable[..., RequestFacts]

USER = {"role": "user", "content": "please explain how a bicycle stays upright while riding"}
ANSWER = {"role": "assistant", "content": "It steers into the fall."}
MORE = {"role": "user", "content": "and without hands?"}


def chat(system: object, *turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A chat body with one system message."""
    return {"model": "m", "messages": [{"role": "system", "content": system}, *(turns or (USER,))]} | fields


def test_documented_spellings_of_one_system_prompt_are_one_group(parse: Parse) -> None:
    """String, single text part, developer role, `instructions` and Anthropic `system` hash alike."""
    key = parse(chat("be brief")).prompt_key
    part = {"type": "text", "text": "be brief"}
    cached = part | {"cache_control": {"type": "ephemeral"}}
    same = [
        parse(chat([part])),
        parse(chat([cached])),
        parse({"model": "m", "messages": [{"role": "developer", "content": "be brief"}, USER]}),
        parse({"model": "m", "messages": [{"content": "be brief", "role": "system"}, USER]}),
        parse({"model": "m", "instructions": "be brief", "input": "x"}, api=Api.RESPONSES),
        parse(
            {"model": "m", "input": [{"type": "message", "role": "developer",
             "content": [{"type": "input_text", "text": "be brief"}]}, USER]}, api=Api.RESPONSES),
        parse({"model": "m", "system": "be brief", "messages": [USER]}, api=Api.MESSAGES),
        parse({"model": "m", "system": [cached], "messages": [USER]}, api=Api.MESSAGES),
    ]  # fmt: skip
    assert key is not None
    assert {facts.prompt_key for facts in same} == {key}


def test_two_parts_are_two_system_messages_but_not_one_text(parse: Parse) -> None:
    """The borders between texts count, their containers do not."""
    parts = parse(chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).prompt_key
    messages = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, USER]
    assert parse({"model": "m", "messages": messages}).prompt_key == parts
    assert parse(chat("ab")).prompt_key != parts


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "unknown", "x": [1, None]},
        "text",
        7,
        None,
    ],
)
def test_what_a_user_attaches_does_not_change_the_group(parse: Parse, part: object) -> None:
    """Pictures, sound, files and unknown parts in user turns leave the system prompt's key alone."""
    with_part = {"role": "user", "content": [{"type": "text", "text": "hi"}, part]}
    assert parse(chat("be brief", with_part)).prompt_key == parse(chat("be brief")).prompt_key


@pytest.mark.parametrize(
    "content", [None, "", [], [{"type": "text", "text": ""}], {}, 7, [None], [{"type": "image"}]]
)
def test_odd_system_contents_are_no_error(parse: Parse, content: object) -> None:
    """Whatever stands in a system message, the request has facts."""
    facts = parse(chat(content))
    assert facts.model == "m"
    assert (facts.prompt_key is None) == (content in (None, "", [], [{"type": "text", "text": ""}]))


def test_tools_belong_to_the_group(parse: Parse) -> None:
    """Tools are part of the cached prefix; an empty list is no tools, a moving cache marker no difference."""
    tool = {"type": "function", "function": {"name": "f"}}
    with_tool = parse(chat("s", tools=[tool])).prompt_key
    assert with_tool != parse(chat("s")).prompt_key
    assert parse(chat("s", tools=[])).prompt_key == parse(chat("s", tools=None)).prompt_key
    assert parse(chat("s", tools=[])).prompt_key == parse(chat("s")).prompt_key
    marked = tool | {"cache_control": {"type": "ephemeral"}}
    assert parse(chat("s", tools=[marked])).prompt_key == with_tool
    assert parse({"model": "m", "messages": [USER], "tools": [tool]}).prompt_key is not None


def test_claude_codes_billing_line_does_not_count(parse: Parse) -> None:
    """Ten turns with ten nonces, as Messages and as chat, in its own part or before other text: one key."""
    keys = set()
    for nonce in range(10):
        line = f"x-anthropic-billing-header: cc_version=2.1.177; cc_entrypoint=cli; cch={nonce:05x};"
        parts = [{"type": "text", "text": line}, {"type": "text", "text": "You are Claude Code"}]
        messages = [{"role": "user", "content": [{"type": "text", "text": USER["content"]}]}]
        keys.add(parse({"model": "m", "system": parts, "messages": messages}, api=Api.MESSAGES).prompt_key)
        keys.add(parse(chat(parts)).prompt_key)
        keys.add(parse(chat(line + "\nYou are Claude Code")).prompt_key)
    assert keys == {parse(chat("You are Claude Code")).prompt_key}


def test_text_that_only_mentions_the_billing_line_is_kept() -> None:
    """The line counts as volatile only at the very beginning of a system text."""
    normaliser = TextNormaliser(KeySettings().normalisers, ignores_dates=True)
    text = "Explain the header x-anthropic-billing-header: cch=1; to users"
    assert normaliser.normalise(text) == text


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("2026-11-29T08:15:00Z", "2026-11-30T23:59:59.123+01:00"),
        ("2026-11-29 08:15:00", "2027-01-01 00:00:00"),
        ("2026-11-29", "2026-11-30"),
        ("29/11/2026", "1/12/2026"),
        ("29.11.2026", "30.11.2026"),
        ("Sunday, November 29, 2026", "Monday, November 30th, 2026"),
        ("29 Nov 2026 at 8:15 PM", "3 Dec 2026 at 11:05 a.m."),
        ("08:15:07", "23:59"),
        ("Today is Sunday", "Today is Monday"),
    ],
)
def test_dates_and_clocks_do_not_count(parse: Parse, one: str, two: str) -> None:
    """At the start, in the middle or at the end of a prompt, over midnight and new year: the same group."""
    filler = "You are a careful assistant. " * 50
    for template in (f"The time is %s. {filler}", f"{filler}It is %s. {filler}", f"{filler}Now: %s"):
        assert parse(chat(template % one)).prompt_key == parse(chat(template % two)).prompt_key


@pytest.mark.parametrize(
    ("one", "two"), [("version 1.2.3", "version 1.2.4"), ("ratio 3", "ratio 4"), ("v2026", "v2027")]
)
def test_other_numbers_do_count(parse: Parse, one: str, two: str) -> None:
    """Two prompts that differ in a version are two prompts."""
    assert parse(chat(one)).prompt_key != parse(chat(two)).prompt_key


def test_a_session_id_is_not_touched_by_a_changing_prompt(parse: Parse) -> None:
    """With an id, nothing in the prompt matters to the session key."""
    keys = {parse(chat(f"nonce {i}"), {"x-session-id": "s"}).session_key for i in range(5)}
    assert len(keys) == 1


def test_operators_can_name_their_own_volatile_text() -> None:
    """A configured pattern replaces the defaults; without patterns every character counts."""
    own = FactsParser(KeySettings(normalisers=(Normaliser(name="run", pattern=r"run-\d+"),)), b"s")
    none = FactsParser(KeySettings(normalisers=(), ignores_dates=False), b"s")
    one, two = (json.dumps(chat(f"job run-{number}")).encode() for number in (1, 2))
    assert own.parse(Api.CHAT, [], one).prompt_key == own.parse(Api.CHAT, [], two).prompt_key
    assert none.parse(Api.CHAT, [], one).prompt_key != none.parse(Api.CHAT, [], two).prompt_key


def test_a_growing_conversation_extends_its_prefix(parse: Parse) -> None:
    """Each turn begins with the whole chain of the turn before: that is what prefix matching relies on."""
    first = parse(chat("s", USER))
    second = parse(chat("s", USER, ANSWER, MORE))
    assert second.prefix[: len(first.prefix)] == first.prefix
    assert len(second.prefix) == 4
    assert (first.is_follow_up, second.is_follow_up) == (False, True)
    assert second.num_prompt_bytes == sum(message.num_bytes for message in second.prefix)


def test_a_change_anywhere_changes_all_that_follows(parse: Parse) -> None:
    """Chain hashes are of prefixes, not of messages."""
    one = parse(chat("s", USER, ANSWER, MORE)).prefix
    edited = ANSWER | {"content": "It does not."}
    two = parse(chat("s", USER, edited, MORE)).prefix
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, True, False, False]


def test_chains_of_tenants_and_models_have_nothing_in_common(parse: Parse) -> None:
    """One tenant cannot see in the routing what another has cached."""
    body = chat("s", USER)
    chains = [parse(body), parse(body, tenant="t"), parse(body | {"model": "n"})]
    assert len({message.chain_hash for facts in chains for message in facts.prefix}) == 6


def test_a_cache_marker_that_moves_on_does_not_break_the_chain(parse: Parse) -> None:
    """Marked messages come as a list with `cache_control`, one turn later as a plain string again."""

    def marked(message: dict[str, Any]) -> dict[str, Any]:
        part = {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
        return message | {"content": [part]}

    def body(*turns: dict[str, Any]) -> bytes:
        return json.dumps({"model": "m", "messages": turns}, separators=(",", ":")).encode()

    first = parse(body(marked(USER)), api=Api.MESSAGES)
    second = parse(body(USER, ANSWER, marked(MORE)), api=Api.MESSAGES)
    third = parse(body(USER, ANSWER, MORE, ANSWER), api=Api.MESSAGES)
    assert [message.chain_hash for message in third.prefix][:1] == [first.prefix[0].chain_hash]
    assert [m.chain_hash for m in second.prefix] == [m.chain_hash for m in third.prefix[:3]]
    assert first.session_key == second.session_key
    assert first.key_source is KeySource.FINGERPRINT


def test_pictures_do_not_count_as_text(parse: Parse) -> None:
    """Five megabytes of base64 cost an engine about as much as a page of text."""
    data = base64.b64encode(bytes(range(256)) * 20_000).decode()
    for part in (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    ):
        turn = {"role": "user", "content": [{"type": "text", "text": "look"}, part, part]}
        assert 8_000 < parse(chat("s", turn)).num_prompt_bytes < 10_000
    text = {"role": "user", "content": "plain words " * 5_000}
    assert parse(chat("s", text)).num_prompt_bytes > 60_000


def test_completion_prompts_match_by_blocks(parse: Parse) -> None:
    """A prompt without messages shares as many whole blocks as its text agrees."""
    one = parse({"model": "m", "prompt": "a" * 5_000 + "b" * 5_000}, api=Api.COMPLETIONS)
    two = parse({"model": "m", "prompt": "a" * 5_000 + "c" * 9_000}, api=Api.COMPLETIONS)
    shared = [a == b for a, b in zip(one.prefix, two.prefix, strict=False)]
    assert shared[:3] == [True, True, False]
    assert one.num_prompt_bytes == 10_002
    tokens = parse({"model": "m", "prompt": [1, 2, 3]}, api=Api.COMPLETIONS)
    assert len(tokens.prefix) == 1


def test_long_conversations_have_a_bounded_prefix(parse: Parse) -> None:
    """Only the first 512 messages take part in matching; the rest still counts as text."""
    facts = parse({"model": "m", "messages": [USER, ANSWER] * 600})
    assert len(facts.prefix) == 512
    assert facts.num_prompt_bytes > 1.9 * sum(message.num_bytes for message in facts.prefix)


@pytest.mark.parametrize(
    ("item", "is_follow_up"),
    [
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, True),
        ({"type": "function_call_output", "call_id": "c", "output": "ok"}, True),
        ({"type": "reasoning", "id": "rs", "summary": []}, True),
        ({"type": "message", "role": "assistant", "content": []}, True),
        ({"role": "user", "content": "again"}, False),
        ({"content": "again"}, False),
    ],
)
def test_items_that_only_a_model_can_have_made_mean_a_follow_up(
    parse: Parse, item: dict[str, Any], is_follow_up: bool
) -> None:
    """Responses items without a role are told apart by their type."""
    facts = parse({"model": "m", "input": [USER, item]}, api=Api.RESPONSES)
    assert facts.is_follow_up is is_follow_up


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from([Api.CHAT, Api.MESSAGES, Api.RESPONSES]),
            st.sampled_from(["", "a", "2026-11-29", "12:30"]),
            st.sampled_from(["", "a"]),
            st.sampled_from([None, [], [{"name": "f"}]]),
        ),
        min_size=1,
        max_size=8,
    ),
    entries=st.integers(1, 3),
)
def test_the_memo_changes_no_result(requests: list[tuple[Api, str, str, object]], entries: int) -> None:
    """A parser with a tiny memo, whatever it has seen before, agrees with a fresh one in every dialect."""
    tiny = FactsParser(KeySettings(prompt_memo_entries=entries), b"s")
    for api, top, text, tools in requests:
        turns = [{"role": "system", "content": text}, USER]
        fields = {"system": top, "instructions": top, "messages": turns, "input": turns, "tools": tools}
        body = json.dumps({"model": "m"} | fields).encode()
        assert tiny.parse(api, [], body) == FactsParser(KeySettings(), b"s").parse(api, [], body)


def test_only_the_ends_of_a_huge_prompt_are_searched_for_dates(parse: Parse) -> None:
    """Cost stays bounded: a clock at either end does not count, one in the far middle does."""
    filler = "words without any digits. " * 4_000

    def group(template: str, clock: str) -> str | None:
        return parse(chat(template % clock)).prompt_key

    for template in (f"%s {filler}{filler}", f"{filler}{filler} %s"):
        assert group(template, "10:00:01") == group(template, "10:00:02")
    middle = f"{filler}%s {filler}"
    assert group(middle, "10:00:01") != group(middle, "10:00:02")


def test_four_markers_are_seen_and_other_members_of_a_part_are_kept() -> None:
    """Four is Anthropic's limit; a part that says more than its text is not reduced to it."""
    marked = [
        {
            "role": "user",
            "content": [{"type": "text", "text": f"t{i}", "cache_control": {"type": "ephemeral"}}],
        }
        for i in range(4)
    ]
    plain = [{"role": "user", "content": f"t{i}"} for i in range(4)]
    parser = FactsParser(KeySettings(), b"s")
    chains = [
        [
            m.chain_hash
            for m in parser.parse(Api.MESSAGES, [], _compact({"model": "m", "messages": turns})).prefix
        ]
        for turns in (marked, plain)
    ]
    assert chains[0] == chains[1]
    cited = _compact({"role": "user", "content": [{"type": "text", "text": "t", "citations": [1]}]})
    assert canonical_message(cited) == cited


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def test_long_messages_match_by_blocks(parse: Parse) -> None:
    """Two questions about one long document share nearly all of their prefix, though no message is equal."""
    document = "A clause of the contract. " * 1000
    one, two = (
        parse({"model": "m", "messages": [{"role": "user", "content": document + question}]}).prefix
        for question in ("Who pays?", "Who signs?")
    )
    shared = {message.chain_hash for message in one} & {message.chain_hash for message in two}
    assert sum(message.num_bytes for message in one if message.chain_hash in shared) > 0.9 * len(document)
    assert one[-1].chain_hash != two[-1].chain_hash
