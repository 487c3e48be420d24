"""Browsers: what pages of which origin are allowed, as pure rules. On the wire: `proxy/test_browsers.py`."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config.config import ConfigError, parse_config
from gateway.downstream.cors import Cors, CorsSettings

PAGE = "https://chat.example.org"
METHODS = ("POST", "OPTIONS")


def cors(**options: Any) -> Cors:
    return Cors(CorsSettings(**({"allow_origins": (PAGE,)} | options)))


@pytest.mark.parametrize(
    "origin", [None, "https://evil.example", PAGE + ".evil.example", PAGE.upper(), "null"]
)
def test_no_other_origin_is_permitted(origin: str | None) -> None:
    """Nothing but `Vary` is said to an origin that is not listed, so caches keep the answers apart."""
    assert cors().answer_headers(origin) == (("vary", "Origin"),)
    assert cors().preflight_headers(origin, "authorization", METHODS) == (("vary", "Origin"),)


def test_a_listed_origin_may_read_answers() -> None:
    """Its own name comes back, with the fields that it may read."""
    headers = dict(cors().answer_headers(PAGE))
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["vary"] == "Origin"
    assert "x-homing-backend" in headers["access-control-expose-headers"]
    assert "x-ratelimit-remaining-tokens" in headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in headers


def test_every_origin_gets_one_and_the_same_answer() -> None:
    """With `*` nothing varies: one cached answer serves all pages."""
    everybody = cors(allow_origins=("*",))
    assert everybody.answer_headers(PAGE) == everybody.answer_headers(None)
    assert dict(everybody.answer_headers(None))["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("asked", "granted"),
    [
        ("authorization, x-stainless-os,content-type", "authorization, x-stainless-os,content-type"),
        (None, None),
        ("", None),
        ("a\r\nb: c", None),
        ("a, , b", None),
        ("x" * 5_000, None),
    ],
)
def test_headers_are_granted_by_name(asked: str | None, granted: str | None) -> None:
    """What a page asks for is echoed (`*` would leave out Authorization), unless it is no list of names."""
    headers = dict(cors().preflight_headers(PAGE, asked, METHODS))
    assert headers.get("access-control-allow-headers") == granted
    assert headers["access-control-allow-methods"] == "POST, OPTIONS"


def test_listed_headers_and_credentials() -> None:
    """A list of header names is granted whatever is asked; credentials are said where they are allowed."""
    strict = cors(allow_headers=("authorization", "content-type"), allow_credentials=True, max_age_s=5)
    headers = dict(strict.preflight_headers(PAGE, "x-other", METHODS))
    assert headers["access-control-allow-headers"] == "authorization, content-type"
    assert headers["access-control-allow-credentials"] == "true"
    assert headers["access-control-max-age"] == "5"


@pytest.mark.parametrize(
    "options",
    [
        {"allow_origins": []},
        {"allow_origins": ["chat.example.org"]},
        {"allow_origins": ["https://chat.example.org/"]},
        {"allow_origins": ["https://*.example.org"]},
        {"allow_origins": ["*", PAGE]},
        {"allow_origins": ["*"], "allow_credentials": True},
        {"allow_origins": [PAGE], "allow_headers": ["a b"]},
        {"allow_origins": [PAGE], "allow_headers": ["a,b"]},
        {"allow_origins": [PAGE], "max_age_s": -1},
        {"allow_headers": ["*"]},
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    """A browser would silently ignore them; the configuration says so at once."""
    with pytest.raises(ConfigError, match="cors"):
        parse_config({"downstream": {"cors": options}})
