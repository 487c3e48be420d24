"""Bodies: what is read, what is refused with which field, and that nothing else can happen."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.values import Api, KeySource, RequestFacts
from gateway.wire.facts import FactsParser
from gateway.wire.settings import KeySettings

Parse = Callable[..., RequestFacts]

JSON_APIS = [api for api in Api if api not in (Api.MODELS, Api.OTHER, Api.AUDIO, Api.REALTIME)]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": MESSAGES}, "model"),
        ({"model": "", "messages": MESSAGES}, "model"),
        ({"model": "  ", "messages": MESSAGES}, "model"),
        ({"model": 7, "messages": MESSAGES}, "model"),
        ({"model": None, "messages": MESSAGES}, "model"),
        ({"model": "m" * 10_000, "messages": MESSAGES}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": None}, "messages"),
        ({"model": "m", "messages": 123}, "messages"),
        ({"model": "m", "messages": {}}, "messages"),
        ({"model": "m", "messages": "hi"}, "messages"),
        ({"model": "m", "messages": MESSAGES, "stream": "yes"}, "stream"),
    ],
)
def test_a_wrong_field_is_named(parse: Parse, api: Api, body: dict[str, Any], param: str) -> None:
    """400 says which field is missing or of the wrong type, before anything is said about the model."""
    with pytest.raises(BadRequest) as caught:
        parse(body, api=api)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        (Api.COMPLETIONS, {"prompt": "x"}, "model"),
        (Api.COMPLETIONS, {"model": "m"}, "prompt"),
        (Api.COMPLETIONS, {"model": "m", "prompt": None}, "prompt"),
        (Api.COMPLETIONS, {"model": 7, "prompt": "x"}, "model"),
        (Api.COMPLETIONS, {"model": "m", "prompt": "x", "stream": 1}, "stream"),
        (Api.RESPONSES, {"input": "x"}, "model"),
        (Api.RESPONSES, {"model": "m", "input": 7}, "input"),
        (Api.EMBEDDINGS, {"input": "x"}, "model"),
        (Api.RERANK, {"model": "", "query": "x"}, "model"),
    ],
)
def test_other_apis_name_their_fields_too(parse: Parse, api: Api, body: dict[str, Any], param: str) -> None:
    """Each API requires only what no engine could do without."""
    with pytest.raises(BadRequest) as caught:
        parse(body, api=api)
    assert caught.value.param == param


@pytest.mark.parametrize("api", JSON_APIS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"text"',
        b"7",
        b"{",
        b'{"model":"m","messages":[]} x',
        b'{"model":"m","messages":[NaN]}',
        b'{"model":"m","messages":[],"seed":Infinity}',
        b'\xef\xbb\xbf{"model":"m","messages":[]}',
        '{"model":"m","messages":[]}'.encode("utf-16"),
        b"model=m&messages=hi",
        b'{"model":"m","messages":[],"x":' + b"[" * 2_000 + b"]" * 2_000 + b"}",
        b'{"model":"m","messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model":"\xff","messages":[],"prompt":"x"}',
    ],
)
def test_what_is_no_json_object_is_refused(parse: Parse, api: Api, body: bytes) -> None:
    """400 in every API: empty, scalar, truncated, trailing, NaN, byte order mark, UTF-16, form, too deep."""
    with pytest.raises(BadRequest):
        parse(body, api=api)


@pytest.mark.parametrize(
    "extra",
    [
        b'"seed":123456789012345678901234567890',
        b'"temperature":1e999',
        b'"x":1.0,"y":1',
        b'"x":"\xff\xfe"',
        b'"max_tokens":"many"',
        b'"max_tokens":-1',
        b'"max_tokens":' + b"9" * 5_000,
        b'"max_tokens":1e3',
        b'"tools":7',
        b'"metadata":[1]',
        b'"metadata":"text"',
    ],
)
def test_what_only_an_engine_can_judge_passes(parse: Parse, extra: bytes) -> None:
    """Values that the gateway does not need are not looked at, however odd."""
    facts = parse(b'{"model":"m","messages":[],%b}' % extra)
    assert (facts.model, facts.max_output_tokens) == ("m", None)


@pytest.mark.parametrize(
    "text",
    [
        r"\ud83d",
        r"\ude00",
        r"\ud83dx\ude00",
        r"\\ud83d",
        r"\ud83d\ud83d\ude00",
        r"\uD83D",
        "\u202e\u200f",
        r"\u0000",
    ],
)
def test_half_characters_are_no_error(parse: Parse, text: str) -> None:
    """Text cut inside a surrogate pair is hashed, equally each time, in any message, tool result or key."""
    system = f'{{"role":"system","content":"be brief {text}"}}'
    turns = (
        f'{{"role":"user","content":"{text}"}},{{"role":"tool","tool_call_id":"{text}","content":"{text}"}}'
    )
    body = f'{{"model":"m","messages":[{system},{turns}],"{text}":1}}'.encode()
    facts = parse(body)
    assert facts.prompt_key is not None
    assert facts == parse(body)


def test_an_escaped_backslash_before_ud83d_is_no_surrogate(parse: Parse) -> None:
    """Repairing half characters leaves text that only looks like an escape as it is."""
    literal, broken, replaced = (
        parse(b'{"model":"m","messages":[],"session_id":"%b"}' % text).session_key
        for text in (rb"\\ud83d\ud83d", rb"\\ud83d\ufffd", rb"\ufffd\ufffd")
    )
    assert literal == broken != replaced


def test_repairing_half_characters_is_bounded_in_size(parse: Parse) -> None:
    """A body over 4 MiB with one is refused, so that nobody can buy seconds of work with one request."""
    half = b'{"model":"m","messages":["%b","\\ud83d"]}'
    assert parse(half % (b"x" * 1_000_000)).model == "m"
    with pytest.raises(BadRequest):
        parse(half % (b"x" * (4 << 20)))


def test_a_half_character_in_the_model_is_refused(parse: Parse) -> None:
    """No engine can be asked for the model that would be left after a repair."""
    with pytest.raises(BadRequest) as caught:
        parse(b'{"model":"m\\ud83d","messages":[]}')
    assert caught.value.param == "model"


@pytest.mark.parametrize("api", JSON_APIS)
@pytest.mark.parametrize(
    "members",
    [
        b'"model":"a","model":"b"',
        b'"model":"b","model":"b"',
        b'"model":"a","mod\\u0065l":"b"',
        b'"\\u006dodel":"a","model":"b"',
        b'"model":"a","Model":"b"',
        b'"MODEL":"a","model":"b"',
        b'"mOd\\u0045l":"a","model":"b"',
        b'"model":"a","model":null',
    ],
)
def test_a_model_given_twice_is_refused(parse: Parse, api: Api, members: bytes) -> None:
    """S01: some parsers take the first, others the last, and Go's take other spellings too."""
    for filler in (b"", b",".join([b"{}"] * 400_000)):
        with pytest.raises(BadRequest) as caught:
            parse(b'{%b,"messages":[%b],"prompt":"x","input":"x"}' % (members, filler), api=api)
        assert caught.value.param
        assert caught.value.param.lower() == "model"


@pytest.mark.parametrize(
    ("api", "fields", "limit"),
    [
        (Api.CHAT, {"max_tokens": 5}, 5),
        (Api.CHAT, {"max_tokens": 5, "max_completion_tokens": 7}, 7),
        (Api.MESSAGES, {"max_tokens": 5}, 5),
        (Api.RESPONSES, {"max_output_tokens": 5}, 5),
        (Api.COMPLETIONS, {"max_tokens": 0}, 0),
        (Api.CHAT, {}, None),
    ],
)
def test_output_limits_are_read_per_dialect(
    parse: Parse, api: Api, fields: dict[str, int], limit: int | None
) -> None:
    """The newer name wins where a dialect has two; absent is not zero."""
    body = {"model": "m", "messages": MESSAGES, "input": "x", "prompt": "x"} | fields
    assert parse(body, api=api).max_output_tokens == limit


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES, Api.RESPONSES, Api.COMPLETIONS, Api.GENERATE])
@pytest.mark.parametrize(("value", "expected"), [(True, True), (False, False), (None, False)])
def test_streaming_is_asked_for_by_true_alone(
    parse: Parse, api: Api, value: bool | None, expected: bool
) -> None:
    """null means the default, as OpenAI's SDKs send it."""
    body = {"model": "m", "messages": MESSAGES, "input": "x", "prompt": "x", "text": "x", "stream": value}
    assert parse(body, api=api).is_stream is expected


def test_a_huge_number_of_items_is_not_walked(parse: Parse) -> None:
    """A body of a million tiny items costs one scan: names still route it, messages are not looked at."""
    body = b'{"model":"m","session_id":"abc","messages":[' + b",".join([b"{}"] * 400_000) + b"]}"
    facts = parse(body)
    assert (facts.model, facts.key_source, facts.prefix) == ("m", KeySource.BODY, ())
    with pytest.raises(BadRequest):
        parse(body.replace(b'"messages":[', b'"messages":7,"x":['))


@pytest.mark.parametrize("api", [Api.OTHER, Api.MODELS])
def test_apis_without_a_known_body_use_headers_alone(parse: Parse, api: Api) -> None:
    """Pass-through paths may carry anything."""
    assert parse(b"\xff not json", {"x-session-id": "s"}, api=api).key_source is KeySource.HEADER


def test_a_query_speaks_for_a_request_without_body(parse: Parse) -> None:
    """Parameters of `/v1/realtime` count as members of a body would, so a session keeps one key."""
    query = "model=org%2Fm&session_id=s-1&session_id=&other=x"
    facts = parse(b"", api=Api.REALTIME, query=query)
    assert (facts.model, facts.key_source, facts.sets_binding) == ("org/m", KeySource.BODY, True)
    in_header = parse(b"", {"x-session-id": "s-1"}, api=Api.REALTIME, query="model=org/m")
    assert in_header.session_key == facts.session_key
    assert parse(b"", api=Api.REALTIME).key_source is KeySource.NONE


@pytest.mark.parametrize("query", ["model=%20", "model=" + "m" * 10_000, "a=b&" * 1_000])
def test_a_query_that_no_engine_could_serve_is_refused(parse: Parse, query: str) -> None:
    """Bad models, and more parameters than anybody needs, are the client's errors."""
    with pytest.raises(BadRequest):
        parse(b"", api=Api.REALTIME, query=query)


SCALARS = st.sampled_from(
    [None, True, 0, 1.5, "", "m", "user", "system", "assistant", "text", "\ud83d", "{{X}}", "a_session_x"]
)
NAMES = st.sampled_from(
    ["messages", "input", "prompt", "text", "system", "instructions", "tools", "stream", "metadata",
     "session_id", "conversation", "previous_response_id", "prompt_cache_key", "max_tokens"]
)  # fmt: skip
PARTS = st.dictionaries(st.sampled_from(["type", "text", "id", "user_id", "session_id"]), SCALARS, max_size=2)
CONTENTS = SCALARS | PARTS | st.lists(SCALARS | PARTS, max_size=2)
MESSAGE = SCALARS | st.dictionaries(st.sampled_from(["role", "content", "type"]), CONTENTS, max_size=3)
BODY = st.builds(
    lambda turns, rest: json.dumps({"model": "m", "messages": turns} | rest).encode(),
    st.lists(MESSAGE, max_size=3),
    st.dictionaries(NAMES, CONTENTS | st.lists(MESSAGE, max_size=2), max_size=3),
)
TORN = st.builds(
    lambda body, at: body[: at % len(body)] + b"\xff" + body[at % len(body) :], BODY, st.integers(0)
)
BODIES = BODY | TORN | st.binary(max_size=20)
HEADERS = st.lists(
    st.tuples(st.sampled_from([b"x-session-id", b"Session_Id", b"cookie", b"x"]), st.binary(max_size=20)),
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(body=BODIES, headers=HEADERS, api=st.sampled_from(Api))
@example(body=b'{"model":"m","messages":[{"role":"\\ud83d"}]}', headers=[], api=Api.CHAT)
@example(body=b'{"model":"m","messages":["x",1,null,[],{}]}', headers=[], api=Api.CHAT)
@example(body=b'{"model":"m","messages":[{"role":1,"content":{}}],"system":{}}', headers=[], api=Api.MESSAGES)
def test_any_bytes_give_facts_or_a_bad_request(
    body: bytes, headers: list[tuple[bytes, bytes]], api: Api
) -> None:
    """No request makes another exception, and equal requests give equal facts on two replicas."""
    try:
        facts = PARSER.parse(api, headers, body)
    except BadRequest:
        return
    assert facts == REPLICA.parse(api, headers, body)
    assert facts.num_prompt_bytes >= sum(message.num_bytes for message in facts.prefix) >= 0


PARSER = FactsParser(KeySettings(cookie_name="x"), b"secret")
REPLICA = FactsParser(KeySettings(cookie_name="x"), b"secret")
