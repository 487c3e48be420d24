"""Authentication: from a request's credentials to its tenant, before its body is read.

A key from the configuration, or a credential verified recently, takes one hash and one lookup. Only a new
credential waits: a token is verified, a key is looked up in Redis, each with its own time limit. Verified
credentials are cached by digest, with an expiry and a bound on their number.

A request may bring several credentials. The first that proves a tenant counts: those known at once before
those that must be verified, in order of arrival, and a client certificate last. What comes beside it is no
mistake.

Invariant: if authentication is required, no request gets a tenant without proof. Knows nothing of routing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from gateway.downstream.request import ClientRequest
from gateway.errors import CannotAuthenticate, Forbidden, GatewayError, Unauthorized
from gateway.tenants.credentials import RawHeader, common_name_of, credentials_of
from gateway.tenants.directory import Directory, digest_of
from gateway.tenants.tenant import Tenant

Recognised = tuple[Tenant, RawHeader | None]
"""A tenant, and the header that proved it. None: a certificate did, or nobody asked."""


class Proof(Protocol):
    """A kind of credential that is verified: a token, or a key stored elsewhere."""

    def may_know(self, credential: bytes) -> bool:
        """Whether a credential looks like this kind. No I/O."""
        ...

    async def prove(self, credential: bytes, digest: bytes) -> tuple[str, float] | None:
        """Return the tenant's name and for how many seconds to cache it, None if not proved. Raises a
        GatewayError when it cannot be verified now, or to say what is wrong with it. Bounded in time; safe to
        cancel."""
        ...


class Gatekeeper:
    """One per gateway process. A reload replaces the directory and keeps the cached proofs."""

    def __init__(
        self,
        directory: Directory,
        proofs: tuple[Proof, ...],
        *,
        clock: Callable[[], float],
        max_remembered: int = 20_000,
    ) -> None:
        self.directory, self._max_remembered = directory, max_remembered
        self._proofs, self._clock = proofs, clock
        self._remembered: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def recognise(self, request: ClientRequest) -> Recognised | None:
        """Return the tenant if it is known without waiting, None to ask `prove`. Raises Unauthorized."""
        directory = self.directory
        if not directory.is_required:
            return directory.anonymous, None
        credentials = credentials_of(request.raw_headers)
        for credential, header in credentials:
            digest = digest_of(credential)
            tenant = directory.by_digest.get(digest)
            if tenant is None and digest in self._remembered:
                name, until_s = self._remembered[digest]
                tenant = directory.named(name) if until_s > self._clock() else None
            if tenant is not None:
                return tenant, header
        if credentials:
            return None
        tenant = self._by_certificate(request)
        if tenant is None:
            raise Unauthorized("No API key was provided. Send it as `Authorization: Bearer KEY`.")
        return tenant, None

    async def prove(self, request: ClientRequest) -> Recognised:
        """Return the tenant of a request whose credentials are new. Raises Unauthorized, Forbidden or
        CannotAuthenticate: the most hopeful that any of them got."""
        refusal: GatewayError = Unauthorized("Incorrect API key provided.")
        for credential, header in credentials_of(request.raw_headers):
            try:
                tenant = await self._verified(credential)
            except (Unauthorized, Forbidden, CannotAuthenticate) as error:
                refusal = max(error, refusal, key=_hope)  # of equal ones what is said of a credential
            else:
                if tenant is not None:
                    return tenant, header
        tenant = self._by_certificate(request)
        if tenant is None:
            raise refusal
        return tenant, None

    async def _verified(self, credential: bytes) -> Tenant | None:
        digest = digest_of(credential)
        for proof in self._proofs:
            if proof.may_know(credential):
                proved = await proof.prove(credential, digest)
                if proved is not None:
                    self._remember(digest, *proved)
                    return self._named(proved[0])
        return None

    def _named(self, name: str) -> Tenant:
        tenant = self.directory.named(name)
        if tenant is None:
            raise Forbidden("The credential is valid, but its tenant is not allowed to use this gateway.")
        return tenant

    def _by_certificate(self, request: ClientRequest) -> Tenant | None:
        """The TLS listener has verified the certificate already."""
        transport = request.transport
        common_name = None if transport is None else common_name_of(transport.get_extra_info("peercert"))
        return None if common_name is None else self.directory.with_certificate(common_name)

    def _remember(self, digest: bytes, name: str, for_s: float) -> None:
        self._remembered[digest] = (name, self._clock() + for_s)
        self._remembered.move_to_end(digest)
        if len(self._remembered) > self._max_remembered:
            self._remembered.popitem(last=False)


def _hope(error: GatewayError) -> int:
    """How near to a tenant a refusal is."""
    return (Unauthorized, Forbidden, CannotAuthenticate).index(type(error))
