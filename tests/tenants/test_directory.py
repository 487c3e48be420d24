"""Tenants of a configuration: their keys, names and rules."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config.config import ConfigError, parse_config
from gateway.limits.settings import TenantLimits
from gateway.tenants.directory import Directory, digest_of
from gateway.tenants.settings import AuthenticationSettings, JwtSettings, TenantSettings

KEY_A, KEY_B = "key-of-tenant-a-0001", "key-of-tenant-b-0001"
JWT = {"issuer": "https://id", "audience": "homing", "jwks_url": "https://id/keys"}


def directory(
    *tenants: dict[str, Any], environ: dict[str, str] | None = None, **authentication: Any
) -> Directory:
    return Directory(
        msgspec.convert(tenants, tuple[TenantSettings, ...]),
        msgspec.convert(authentication, AuthenticationSettings),
        TenantLimits(requests_per_minute=7),
        secret=b"secret",
        environ={"A_KEYS": KEY_A, "B_KEYS": f"{KEY_B}, another-key-of-b-01\n", **(environ or {})},
    )


def name_of(known: Directory, key: str) -> str | None:
    tenant = known.by_digest.get(digest_of(key.encode()))
    return None if tenant is None else tenant.name


def test_without_tenants_everybody_is_one_anonymous_tenant() -> None:
    """Nothing is required, and the limits for every tenant hold for all together."""
    known = directory()
    assert not known.is_required
    assert (known.anonymous.name, known.anonymous.has_limits, known.anonymous.is_known) == (
        "default",
        True,
        False,
    )


def test_keys_come_from_the_environment_a_file_or_as_hashes(tmp_path: Path) -> None:
    """All are known by digest; a file may hold keys, hashes and comments."""
    file = tmp_path / "keys"
    hashed = hashlib.sha256(b"key-in-file-as-hash").hexdigest()
    file.write_text(f"# of c\nkey-in-file-in-clear\nsha256:{hashed}\n\n")
    given = hashlib.sha256(b"key-in-configuration").hexdigest()
    known = directory(
        {"name": "a", "keys_env": "A_KEYS"},
        {"name": "b", "keys_env": "B_KEYS"},
        {"name": "c", "keys_file": str(file), "key_hashes": [f"sha256:{given}"]},
    )
    assert [name_of(known, key) for key in (KEY_A, KEY_B, "another-key-of-b-01")] == ["a", "b", "b"]
    in_c = ("key-in-file-in-clear", "key-in-file-as-hash", "key-in-configuration")
    assert {name_of(known, key) for key in in_c} == {"c"}
    assert name_of(known, "# of c") is None
    assert known.is_required


@pytest.mark.parametrize(
    ("tenants", "says"),
    [
        ([{"name": "a", "keys_env": "NONE"}], "NONE contains no key"),
        ([{"name": "a", "keys_env": "SHORT"}], "shorter than 16"),
        ([{"name": "a", "keys_file": "/does/not/exist"}], "cannot be read"),
        ([{"name": "a"}, {"name": "a"}], "two tenants are named"),
        ([{"name": "a", "keys_env": "A_KEYS"}, {"name": "b", "keys_env": "A_KEYS"}], "share a key"),
        ([{"name": "a", "keys_env": "ODD"}], "no SHA-256"),
        (
            [{"name": "a", "certificate_names": ["x"]}, {"name": "b", "certificate_names": ["x"]}],
            "certificate name",
        ),
    ],
)
def test_what_cannot_work_is_refused_without_telling_a_key(tenants: list[dict[str, Any]], says: str) -> None:
    """At start, with the tenant's name and what to look at."""
    with pytest.raises(ValueError, match=says) as caught:
        directory(*tenants, environ={"SHORT": "short-key", "ODD": "sha256:123"})
    assert KEY_A not in str(caught.value)
    assert "short-key" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "x" * 65},
        {"name": "a", "key_hashes": ["sha256:abc"]},
        {"name": "a", "key_hashes": [KEY_A]},
        {"name": "a", "priority": 1000},
    ],
)
def test_settings_of_a_tenant_are_checked(settings: dict[str, Any]) -> None:
    """A key in clear is not taken for a hash, and is not repeated in the error."""
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(settings, TenantSettings)
    assert KEY_A not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"jwks_url": "http://id.example/keys"},
        {"jwks_url": "ftp://id.example/keys"},
        {"algorithms": ["HS256"]},
        {"algorithms": ["none"]},
        {"algorithms": []},
        {"refresh_s": 0},
    ],
)
def test_settings_of_tokens_are_checked(settings: dict[str, Any]) -> None:
    """Keys come over TLS, and a signature that a verifier could make is none."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**JWT, **settings}, JwtSettings)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"tenants": [{"name": "a"}]}, "'a' has no key"),
        ({"tenants": [{"name": "a", "certificate_names": ["x"]}]}, "client_ca_file is not set"),
        ({"authentication": {"keys_in_redis": True}}, "needs sessions.store: redis"),
        ({"tenants": [{"name": "a", "keys_env": "A", "limits": {"max_in_flight": 0}}]}, "max_in_flight"),
    ],
)
def test_a_configuration_that_lets_nobody_in_is_refused(config: dict[str, Any], says: str) -> None:
    """At start, instead of by the first client."""
    with pytest.raises(ConfigError, match=says):
        parse_config(config)


def test_rules_of_a_tenant_or_those_for_all() -> None:
    """Own limits replace the common ones as a whole."""
    known = directory(
        {"name": "a", "limits": {"max_in_flight": 3}, "models": ["m"], "priority": 2}, {"name": "b"}
    )
    a, b = known.named("a"), known.named("b")
    assert a is not None
    assert b is not None
    assert (a.limits, a.has_limits, a.priority) == (TenantLimits(max_in_flight=3), True, 2)
    assert (b.limits, b.models) == (TenantLimits(requests_per_minute=7), None)
    assert a.may_use("m")
    assert not a.may_use("other")
    assert not a.may_use(None)


def test_unlisted_tenants_are_taken_only_if_asked_for() -> None:
    """A name that only a token knows has the common rules and a name of its own."""
    assert directory({"name": "a"}, jwt=JWT).named("x") is None
    open_to_all = directory({"name": "a"}, jwt={**JWT, "accepts_unlisted_tenants": True}, cache_salt=True)
    one, two = open_to_all.named("one"), open_to_all.named("two")
    assert one is not None
    assert two is not None
    assert (one.name, one.limits.requests_per_minute) == ("one", 7)
    assert one.cache_salt != two.cache_salt
    assert open_to_all.named("") is None
    assert open_to_all.named("x" * 257) is None
    assert open_to_all.named("x\n") is None
    assert open_to_all.named("half \ud800") is None, "no log line could hold it"
    assert open_to_all.named("Société d'été") is not None


def test_salts_differ_by_tenant_and_secret_and_nothing_else() -> None:
    """All replicas make the same; off means none."""
    first, again = directory({"name": "a"}, cache_salt=True), directory({"name": "a"}, cache_salt=True)
    other = Directory(
        (TenantSettings(name="a"),),
        AuthenticationSettings(cache_salt=True),
        TenantLimits(),
        secret=b"other",
        environ={},
    )
    salts = [known.named("a").cache_salt for known in (first, again, other)]  # type: ignore[union-attr]  # None fails
    assert salts[0] == salts[1] != salts[2]
    assert salts[0] is not None
    assert len(salts[0]) == 32
    assert directory({"name": "a"}).named("a").cache_salt is None  # type: ignore[union-attr]  # None fails
