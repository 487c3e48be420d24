"""Options of tenants and of client authentication. They contain names or hashes of secrets, never secrets.

Invariant: contradictory settings cannot be built; the error names the option and no secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from gateway.limits.settings import TenantLimits
from gateway.values import MAX_NAME_LENGTH, NAME_CHARACTERS, NAME_PATTERN
from gateway.wire.cache_salt import parse_salted

_NAME = re.compile(rf"{NAME_PATTERN}\Z")
_KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}\Z")
ALGORITHMS = frozenset(
    ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
)
"""Signatures with a public key. With a shared secret, whoever can verify could also sign."""


class TenantSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tenant: how its clients authenticate and what they may do."""

    name: str
    """Name used in logs, tokens and Redis: `[A-Za-z0-9._-]`, at most 64 characters."""
    keys_env: str | None = None
    """Environment variable with the tenant's API keys, separated by commas or blanks."""
    keys_file: str | None = None
    """File with one key, or the `sha256:…` of one, per line. Read at start and at each reload."""
    key_hashes: tuple[str, ...] = ()
    """`sha256:` and the hex digest of each API key, for a configuration without secrets."""
    certificate_names: tuple[str, ...] = ()
    """Common names of client certificates. Needs `listen.tls.client_ca_file`."""
    models: tuple[str, ...] | None = None
    """Models that the tenant may use and see. Default: all."""
    limits: TenantLimits | None = None
    """Limits of this tenant, instead of `limits.per_tenant`."""
    priority: int = 0
    """Priority in the queue. Each step counts as `limits.queue_priority_step_s` of waiting."""

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(
                f"name {self.name!r} must match [A-Za-z0-9][{NAME_CHARACTERS}]* and have at most "
                f"{MAX_NAME_LENGTH} characters"
            )
        if any(not _KEY_HASH.match(key_hash) for key_hash in self.key_hashes):
            raise ValueError(
                f"key_hashes of {self.name!r} must be `sha256:` and 64 lower-case hex digits each"
            )
        if not -100 <= self.priority <= 100:
            raise ValueError(f"priority must be -100..100, got {self.priority}")


class JwtSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bearer tokens of an identity provider (OIDC). Needs `pip install homing[jwt]`."""

    issuer: str
    """Required `iss` of a token."""
    audience: str
    """Required `aud` of a token, alone or among others."""
    jwks_url: str
    """URL of the provider's public keys: https, or http on loopback."""
    tenant_claim: str = "tenant"
    """Claim that names the tenant. `a.b` is member b of claim a."""
    accepts_unlisted_tenants: bool = False
    """Accept tenants that are not listed under `tenants`. They get `limits.per_tenant` and all models."""
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    """Accepted signature algorithms."""
    leeway_s: float = 30.0
    """Allowed clock difference when the times in a token are checked."""
    refresh_s: float = 300.0
    """How often the provider's keys are fetched."""
    max_cached_s: float = 60.0
    """How long a verified token is not verified again. Its expiry is always checked."""

    def __post_init__(self) -> None:
        odd = sorted(set(self.algorithms) - ALGORITHMS)
        if odd or not self.algorithms:
            raise ValueError(f"algorithms: {odd} are not among {', '.join(sorted(ALGORITHMS))}")
        url = urlsplit(self.jwks_url)
        is_local = url.hostname in ("localhost", "127.0.0.1", "::1")
        if url.scheme != "https" and not (url.scheme == "http" and is_local):
            raise ValueError("jwks_url must be https: whoever can change these keys can impersonate anybody")
        if self.refresh_s <= 0 or self.leeway_s < 0 or self.max_cached_s < 0:
            raise ValueError("refresh_s must be above 0, leeway_s and max_cached_s at least 0")


class AuthenticationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How clients authenticate. They must if there are tenants, keys in Redis or `jwt`."""

    keys_in_redis: bool = False
    """Also look up API keys in Redis, where they can be added and revoked. Needs `sessions.store: redis`."""
    keys_in_redis_ttl_s: float = 30.0
    """How long a key found in Redis is cached, which is also how long a revoked key may still work."""
    jwt: JwtSettings | None = None
    """Accept bearer tokens of this identity provider."""
    passes_client_key: bool = False
    """Forward the credential by which the gateway has recognised a client to backends without `api_key_env`.
    Other credentials beside it are never forwarded."""
    cache_salt: bool = False
    """Separate the engines' prefix caches by tenant, by adding a `cache_salt` to each request."""
    also_salted: tuple[str, ...] = ()
    """Engine kinds and APIs that heed `cache_salt`, besides those known to (see security.md): `vllm/messages`
    for a vLLM that has it. The API is chat, completions, responses, messages or generate."""
    unsalted: Literal["refuse", "share"] = "refuse"
    """What to do, with `cache_salt`, where the engine is not known to heed a salt in the API of a request:
    refuse it with 403, or send it, so that tenants share that cache."""

    def __post_init__(self) -> None:
        if not 0 < self.keys_in_redis_ttl_s <= 3600:
            raise ValueError("keys_in_redis_ttl_s must be above 0 and at most 3600")
        for name in self.also_salted:
            parse_salted(name)


def must_authenticate(tenants: Sequence[TenantSettings], settings: AuthenticationSettings) -> bool:
    """Whether clients must authenticate. If not, everybody is the anonymous tenant."""
    return bool(tenants) or settings.keys_in_redis or settings.jwt is not None


def check_proofs(
    tenants: Sequence[TenantSettings], settings: AuthenticationSettings, *, asks_for_certificates: bool
) -> None:
    """Raise ValueError for a tenant whose clients have no way to authenticate."""
    for tenant in tenants:
        if tenant.certificate_names and not asks_for_certificates:
            raise ValueError(
                f"tenant {tenant.name!r} has certificate_names, but listen.tls.client_ca_file is not set"
            )
        has_keys = tenant.keys_env is not None or tenant.keys_file is not None or bool(tenant.key_hashes)
        is_named_elsewhere = settings.keys_in_redis or settings.jwt is not None
        if not (has_keys or tenant.certificate_names or is_named_elsewhere):
            raise ValueError(f"tenant {tenant.name!r} has no key: set keys_env, keys_file or key_hashes")
