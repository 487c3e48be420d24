"""The one rewrite of a body: a salt at its end."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest, Forbidden, UnsupportedMediaType
from gateway.fleet.settings import ENGINES
from gateway.values import Api
from gateway.wire.cache_salt import CacheSalting

SALT = "0123456789abcdef"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


class Salted(pydantic.BaseModel):
    cache_salt: str | None = None


class SaltedStruct(msgspec.Struct):
    cache_salt: str | None = None


def _salted(body: bytes, content_encoding: str | None = None) -> bytes:
    return CacheSalting().salted("vllm", Api.CHAT, "/v1/chat/completions", body, SALT, content_encoding)


@given(
    st.dictionaries(st.text(max_size=6) | st.just("cache_salt"), json_values, max_size=5),
    st.sampled_from([None, 1]),
    st.text(" \t\r\n", max_size=4),
    st.booleans(),
)
def test_any_object_gets_the_salt_and_keeps_all_else(
    body: dict[str, Any], indent: int | None, blanks: str, is_ascii: bool
) -> None:
    """Every member but the salt is what it was; the bytes before the end are those received."""
    received = (json.dumps(body, indent=indent, ensure_ascii=is_ascii) + blanks).encode()
    sent = _salted(received)
    assert json.loads(sent) == {**body, "cache_salt": SALT}
    assert sent.startswith(received.rstrip()[:-1])


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt":"victim"}',
        b'{"cache\\u005fsalt":"victim"}',
        b'{"cache_salt":"a","cache_salt":"b"}',
        b'{"messages":[{"cache_salt":"inner"}],"cache_salt":null}',
        b"{}",
        b"{ \n}",
    ],
)
def test_a_clients_own_salt_loses_in_every_parser(body: bytes) -> None:
    """vLLM and SGLang read with json and pydantic, our worker with msgspec: the last member counts."""
    sent = _salted(body)
    assert json.loads(sent)["cache_salt"] == SALT
    assert Salted.model_validate_json(sent).cache_salt == SALT
    assert msgspec.json.decode(sent, type=SaltedStruct).cache_salt == SALT


CACHED = {
    Api.CHAT: "/v1/chat/completions",
    Api.COMPLETIONS: "/v1/completions",
    Api.RESPONSES: "/v1/responses",
    Api.MESSAGES: "/v1/messages",
    Api.GENERATE: "/generate",
}
HEEDED = {
    "torch": {Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.MESSAGES},
    "vllm": {Api.CHAT, Api.COMPLETIONS, Api.RESPONSES},
    "sglang": {Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.GENERATE},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("api", CACHED)
def test_an_engine_gets_the_salt_or_not_the_request(engine: str, api: Api) -> None:
    """Each engine in each API with a prefix cache: salted, or refused; shared only if so configured."""
    arguments = (engine, api, CACHED[api], b'{"a":1}', SALT, None)
    if api in HEEDED.get(engine, ()):
        name = "extra_key" if api is Api.GENERATE else "cache_salt"
        assert json.loads(CacheSalting().salted(*arguments)) == {"a": 1, name: SALT}
        return
    with pytest.raises(Forbidden, match=engine):
        CacheSalting().salted(*arguments)
    assert CacheSalting(shares_unsalted=True).salted(*arguments) == b'{"a":1}'
    also = CacheSalting([f"{engine}/{api.value}"])
    assert json.loads(also.salted(*arguments)) == {"a": 1, "cache_salt": SALT}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_computes_no_prompt_is_not_refused(engine: str) -> None:
    """Counts and reads use no cache."""
    salting = CacheSalting()
    for api, path in (
        (Api.MESSAGES, "/v1/messages/count_tokens"),
        (Api.RESPONSES, "/v1/responses/input_tokens"),
        (Api.TOKENIZE, "/tokenize"),
    ):
        assert json.loads(salting.salted(engine, api, path, b'{"a":1}', SALT, None))["a"] == 1
    assert salting.salted(engine, Api.RESPONSES, "/v1/responses/resp_1", b"", SALT, None) == b""


@pytest.mark.parametrize("name", ["", "vllm", "vllm/", "/chat", "vllm/audio", "vllm/chat/x"])
def test_odd_pairs_are_no_configuration(name: str) -> None:
    """An engine and an API that has a prefix cache."""
    with pytest.raises(ValueError, match="engine and an API"):
        CacheSalting([name])


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_a_compressed_body_is_refused_and_not_sent_unsalted(encoding: str) -> None:
    """Passing it on would put it into the cache that all tenants share."""
    with pytest.raises(UnsupportedMediaType):
        _salted(b"\x1f\x8b", encoding)
    assert _salted(b"{}", "identity") != b"{}"


@pytest.mark.parametrize("body", [b"[1]", b"1", b'{"a":1}x', '{"a":1}'.encode("utf-16")])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    """There is no place for a member in it."""
    with pytest.raises(BadRequest):
        _salted(body)
