"""All tenants of one configuration, found by the digest of an API key, by name or by certificate.

Keys are kept as SHA-256 digests only: a look-up compares nothing that a clock could tell about a key, and a
dump of this process or of Redis holds none. (A slow password hash would protect guessable secrets; keys are
required to be long, and it would cost a request.) Built once per configuration, replaced as a whole.
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
    """Raises ValueError that names the tenant and the option, never a key."""

    def __init__(
        self,
        tenants: Sequence[TenantSettings],
        authentication: AuthenticationSettings,
        per_tenant: TenantLimits,
        *,
        secret: bytes,
        environ: Mapping[str, str],
    ) -> None:
        """`secret` makes the cache salts."""
        self._per_tenant, self._salts, self._secret = per_tenant, authentication.cache_salt, secret
        jwt = authentication.jwt
        self._accepts_unlisted = jwt is not None and jwt.accepts_unlisted_tenants
        self.by_digest: dict[bytes, Tenant] = {}
        self._by_certificate: dict[str, Tenant] = {}
        self._by_name: dict[str, Tenant] = {}
        self.is_required = must_authenticate(tenants, authentication)
        for settings in tenants:
            self._add(settings, environ)
        # whoever comes, where nobody must say who he is
        self.anonymous = Tenant(limits=per_tenant, has_limits=not per_tenant.is_unlimited)

    def named(self, name: str) -> Tenant | None:
        """Return the tenant that an identity provider or Redis names; None: there is none such here.

        A claim may be its user's choice, and will stand in logs and traces: a name is one printable line.
        """
        tenant = self._by_name.get(name)
        if tenant is None and self._accepts_unlisted and 0 < len(name) <= 256 and name.isprintable():
            return self._make(TenantSettings(name="unlisted"), name)
        return tenant

    def with_certificate(self, common_name: str) -> Tenant | None:
        return self._by_certificate.get(common_name)

    def _add(self, settings: TenantSettings, environ: Mapping[str, str]) -> None:
        if settings.name in self._by_name:
            raise ValueError(f"two tenants have the name {settings.name!r}")
        tenant = self._by_name[settings.name] = self._make(settings, settings.name)
        for digest in _digests(settings, environ):
            known = self.by_digest.setdefault(digest, tenant)
            if known is not tenant:
                raise ValueError(f"tenants {known.name!r} and {tenant.name!r} have a key in common")
        for name in settings.certificate_names:
            if self._by_certificate.setdefault(name, tenant) is not tenant:
                raise ValueError(f"two tenants have the certificate name {name!r}")

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
        """The same on all replicas, and not to be guessed by who does not know our secret."""
        text = b"homing-cache-salt:" + name.encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()[:32]


def digest_of(credential: str) -> bytes:
    """Return what a credential is known by."""
    return hashlib.sha256(credential.encode("utf-8", "surrogateescape")).digest()


def _digests(settings: TenantSettings, environ: Mapping[str, str]) -> Iterable[bytes]:
    yield from (bytes.fromhex(one.removeprefix(_HASH_PREFIX)) for one in settings.key_hashes)
    where = f"tenant {settings.name!r}"
    if settings.keys_env is not None:
        keys = environ.get(settings.keys_env, "").replace(",", " ").split()
        if not keys:
            raise ValueError(f"{where}: the environment variable {settings.keys_env} holds no key")
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
            raise ValueError(f"{where}: a line begins with {_HASH_PREFIX} and goes on with no SHA-256")
        return digest
    if len(key) < MIN_KEY_LENGTH:
        raise ValueError(f"{where}: a key is shorter than {MIN_KEY_LENGTH} characters and could be guessed")
    return digest_of(key)
