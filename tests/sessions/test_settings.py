"""Options of the session store: what is refused, and what stays secret."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.redis_link.secret import Secret
from gateway.redis_link.settings import RedisSettings, parse_address
from gateway.sessions.settings import SessionsSettings


def test_defaults_suit_one_machine() -> None:
    """Without any option: the memory store, an hour, a million sessions."""
    settings = msgspec.convert({}, SessionsSettings)
    assert (settings.store, settings.ttl_s, settings.max_sessions) == ("memory", 3600.0, 1_000_000)


@pytest.mark.parametrize(
    "options",
    [
        {"store": "mongodb"},
        {"ttl_s": 0},
        {"ttl_s": -1},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
        {"max_sessions": 0},
        {"unknown": 1},
        {"redis": {"budget_ms": 0}},
        {"redis": {"pool_size": 0}},
        {"redis": {"breaker_failures": 0}},
        {"redis": {"url": "redis://a:1/0", "sentinels": ["a:1"]}},
        {"redis": {"sentinels": ["a:1"], "cluster_nodes": ["a:1"]}},
        {"redis": {"sentinels": ["nohost"]}},
        {"redis": {"cluster_nodes": ["host:port"]}},
        {"redis": {"cluster_nodes": ["host:70000"]}},
        {"redis": {"key_prefix": ""}},
        {"redis": {"key_prefix": "a{b}"}},
        {"redis": {"key_prefix": "a b"}},
        {"redis": {"tls": {"enabled": True, "cert_file": "only.pem"}}},
    ],
)
def test_nonsense_is_refused(options: dict[str, Any]) -> None:
    """Unknown, impossible and contradictory options cannot be built."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, SessionsSettings)


def test_password_in_the_url_is_refused_without_repeating_it() -> None:
    """A password does not belong in the file, and the error does not print it."""
    with pytest.raises(ValueError) as caught:
        RedisSettings(url="redis://user:hunter2@host:6379/0")
    assert "hunter2" not in str(caught.value)
    assert "HOMING_REDIS_PASSWORD" in str(caught.value)


def test_secrets_come_from_the_environment_and_are_masked() -> None:
    """Password and url are read from the environment; printing them shows nothing."""
    environ = {"HOMING_REDIS_PASSWORD": "hunter2", "REDIS_URL": "redis://:hunter2@h:1/0"}
    settings = RedisSettings()
    for secret in (settings.password(environ), settings.resolved_url(environ)):
        assert "hunter2" not in f"{secret} {secret!r}"
        assert "hunter2" in secret.reveal()
    assert not settings.password({})
    assert repr(Secret("")) == "Secret('')"


def test_configured_url_wins_over_the_environment() -> None:
    """The variable is for when nothing is configured; without both it is this machine's Redis."""
    environ = {"REDIS_URL": "redis://other:1/0"}
    assert RedisSettings(url="redis://mine:1/0").resolved_url(environ).reveal() == "redis://mine:1/0"
    assert RedisSettings().resolved_url({}).reveal() == "redis://127.0.0.1:6379/0"


def test_addresses() -> None:
    """Names, IPv4 and bracketed IPv6 addresses with a port."""
    assert parse_address("redis.local:6379") == ("redis.local", 6379)
    assert parse_address("[::1]:6380") == ("::1", 6380)
