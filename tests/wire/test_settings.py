"""Options of the wire layer: invalid ones are refused when they are read, not when a request comes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.wire.settings import HeaderSettings, KeySettings, Normaliser


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headers": ["X-Session-Id"]}, "lower-case"),
        ({"headers": ["x-a", "x-a"]}, "duplicate"),
        ({"headers": ["bad name"]}, "lower-case"),
        ({"headers": ["x-request-id"]}, "cannot name a session"),
        ({"headers": ["authorization"]}, "cannot name a session"),
        ({"headers": ["x-forwarded-for"]}, "cannot name a session"),
        ({"header_qualifiers": ["traceparent"]}, "cannot name a session"),
        ({"auxiliary_headers": ["X-Task"]}, "lower-case"),
        ({"auxiliary_headers": ["x-class=Title"]}, "lower-case value"),
        ({"auxiliary_headers": ["x-class", "x-class=title"]}, "duplicate"),
        ({"sources": ["header", "header"]}, "duplicate"),
        ({"sources": ["luck"]}, "luck"),
        ({"body_fields": ["a.b.c"]}, "a.b.c"),
        ({"body_fields": ["model"]}, "cannot name a session"),
        ({"body_fields": ["input.session"]}, "cannot name a session"),
        ({"body_fields": [""]}, "must have the form"),
        ({"body_fields": ["a."]}, "must have the form"),
        ({"ignored_pattern": "("}, "regular expression"),
        ({"max_key_length": 0}, "max_key_length"),
        ({"fingerprint_min_bytes": -1}, "fingerprint_min_bytes"),
        ({"cookie_name": "a b"}, "cookie"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"normalisers": [{"name": "x", "pattern": "["}]}, "regular expression"),
    ],
)
def test_contradictions_are_refused_with_their_name(options: dict[str, Any], message: str) -> None:
    """Each refusal says which option is wrong."""
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(options, KeySettings)


def test_defaults_are_valid_and_hold_no_request_id() -> None:
    """The default alias list never names a header that changes with each request."""
    headers = KeySettings().headers
    assert headers[0] == "x-session-id"
    assert not {"x-request-id", "traceparent", "x-client-request-id", "idempotency-key"} & set(headers)


def test_a_bad_normaliser_names_itself() -> None:
    """An operator sees which of his patterns does not compile."""
    with pytest.raises(ValueError, match="'dates'"):
        Normaliser(name="dates", pattern="(")


def test_stripped_headers_are_lower_case_names() -> None:
    """A name that could never match is refused."""
    with pytest.raises(ValueError, match="stripped_headers"):
        HeaderSettings(stripped_headers=("X-Upper",))
