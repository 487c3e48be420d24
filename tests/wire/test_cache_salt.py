"""The one rewrite of a body: a salt at its end."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest, UnsupportedMediaType
from gateway.values import Api
from gateway.wire.cache_salt import with_cache_salt

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
    sent = with_cache_salt(Api.CHAT, received, SALT, None)
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
    sent = with_cache_salt(Api.COMPLETIONS, body, SALT, None)
    assert json.loads(sent)["cache_salt"] == SALT
    assert Salted.model_validate_json(sent).cache_salt == SALT
    assert msgspec.json.decode(sent, type=SaltedStruct).cache_salt == SALT


@pytest.mark.parametrize("api", [Api.EMBEDDINGS, Api.TOKENIZE, Api.AUDIO, Api.OTHER])
def test_requests_without_a_prefix_cache_stay_as_they_are(api: Api) -> None:
    """Their engines' parsers may refuse unknown members."""
    assert with_cache_salt(api, b'{"a":1}', SALT, None) == b'{"a":1}'


def test_sglangs_own_api_has_its_own_name_for_it() -> None:
    """`/generate` takes `extra_key`."""
    assert json.loads(with_cache_salt(Api.GENERATE, b'{"text":"x"}', SALT, None))["extra_key"] == SALT


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_a_compressed_body_is_refused_and_not_sent_unsalted(encoding: str) -> None:
    """Passing it on would put it into the cache that all tenants share."""
    with pytest.raises(UnsupportedMediaType):
        with_cache_salt(Api.CHAT, b"\x1f\x8b", SALT, encoding)
    assert with_cache_salt(Api.CHAT, b"{}", SALT, "identity") != b"{}"


@pytest.mark.parametrize("body", [b"[1]", b"1", b'{"a":1}x', '{"a":1}'.encode("utf-16")])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    """There is no place for a member in it."""
    with pytest.raises(BadRequest):
        with_cache_salt(Api.CHAT, body, SALT, None)


def test_a_request_without_a_body_stays_without() -> None:
    """Such as GET /v1/responses/ID."""
    assert with_cache_salt(Api.RESPONSES, b"", SALT, None) == b""
