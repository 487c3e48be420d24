"""All tenants of one configuration, found by the digest of an API key, by name or by certificate.

Keys are kept only as SHA-256 digests: a lookup leaks nothing about a key through timing, and a dump of this
process or of Redis contains no keys. (A slow password hash would protect guessable secrets, at a cost per
request; keys are required to be long instead.) Built once per configuration and replaced as a whole.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gateway.limits.settings import TenantLimits
from gateway.tenants.settings import AuthenticationSettings, TenantSettings, must_authenticate
from gateway.tenants.tenant import Tenant

MIN_KEY_LENGTH = 16
_HASH_PREFIX = "sha256:"


class Directory:
    """Raises ValueError, which names the tenant and the option but never a key."""

    def __init__(
        self,
        tenants: Sequence[TenantSettings],
        authentication: AuthenticationSettings,
        per_tenant: TenantLimits,
        *,
        secret: bytes,
        environ: Mapping[str, str],
    ) -> None:
        """`secret` is the key of the HMAC that makes cache salts."""
        self._per_tenant, self._salts, self._secret = per_tenant, authentication.cache_salt, secret
        jwt = authentication.jwt
        self._accepts_unlisted = jwt is not None and jwt.accepts_unlisted_tenants
        self.by_digest: dict[bytes, Tenant] = {}
        self._by_certificate: dict[str, Tenant] = {}
        self._by_name: dict[str, Tenant] = {}
        self.is_required = must_authenticate(tenants, authentication)
        for settings in tenants:
            self._add(settings, environ)
        # every client, where authentication is not required
        self.anonymous = Tenant(limits=per_tenant, has_limits=not per_tenant.is_unlimited)

    def named(self, name: str) -> Tenant | None:
        """Return the tenant that an identity provider or Redis names, None if it is unknown here.

        A user may control the claim, and the name appears in logs and traces: it must be one printable line.
        """
        tenant = self._by_name.get(name)
        if tenant is None and self._accepts_unlisted and 0 < len(name) <= 256 and name.isprintable():
            return self._make(TenantSettings(name="unlisted"), name)
        return tenant

    def with_certificate(self, common_name: str) -> Tenant | None:
        return self._by_certificate.get(common_name)

    def _add(self, settings: TenantSettings, environ: Mapping[str, str]) -> None:
        if settings.name in self._by_name:
            raise ValueError(f"two tenants are named {settings.name!r}")
        tenant = self._by_name[settings.name] = self._make(settings, settings.name)
        for digest in _digests(settings, environ):
            known = self.by_digest.setdefault(digest, tenant)
            if known is not tenant:
                raise ValueError(f"tenants {known.name!r} and {tenant.name!r} share a key")
        for name in settings.certificate_names:
            if self._by_certificate.setdefault(name, tenant) is not tenant:
                raise ValueError(f"two tenants share the certificate name {name!r}")

    def _make(self, settings: TenantSettings, name: str) -> Tenant:
        limits = settings.limits or self._per_tenant
        return Tenant(
            name=name,
            models=None if settings.models is None else frozenset(settings.models),
            limits=limits,
            has_limits=not limits.is_unlimited,
            priority=settings.priority,
            cache_salt=self._salt(name) if self._salts else None,
            is_known=True,
        )

    def _salt(self, name: str) -> str:
        """The same on all replicas, and not guessable without the secret."""
        text = b"homing-cache-salt:" + name.encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()[:32]


def digest_of(credential: bytes) -> bytes:
    """Return the digest by which a credential is known."""
    return hashlib.sha256(credential).digest()


def _digests(settings: TenantSettings, environ: Mapping[str, str]) -> Iterable[bytes]:
    yield from (bytes.fromhex(key_hash.removeprefix(_HASH_PREFIX)) for key_hash in settings.key_hashes)
    where = f"tenant {settings.name!r}"
    if settings.keys_env is not None:
        keys = environ.get(settings.keys_env, "").replace(",", " ").split()
        if not keys:
            raise ValueError(f"{where}: environment variable {settings.keys_env} contains no key")
        yield from (_digest(key, f"{where}: {settings.keys_env}") for key in keys)
    if settings.keys_file is not None:
        try:
            lines = Path(settings.keys_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{where}: keys_file {settings.keys_file!r} cannot be read: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        yield from (_digest(key, f"{where}: {settings.keys_file}") for key in keys)


def _digest(key: str, where: str) -> bytes:
    if key.startswith(_HASH_PREFIX):
        try:
            digest = bytes.fromhex(key.removeprefix(_HASH_PREFIX))
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise ValueError(f"{where}: a line begins with {_HASH_PREFIX} but has no SHA-256 after it")
        return digest
    if len(key) < MIN_KEY_LENGTH:
        raise ValueError(f"{where}: a key is shorter than {MIN_KEY_LENGTH} characters")
    return digest_of(key.encode("utf-8", "surrogateescape"))
