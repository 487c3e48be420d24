"""Authentication: from a request's credentials to its tenant, before its body is read.

A key from the configuration, or a credential verified recently, takes one hash and one lookup. Only a new
credential waits: a token is verified, a key is looked up in Redis, each with its own time limit. Verified
credentials are cached by digest, with an expiry and a bound on their number.

Invariant: if authentication is required, no request gets a tenant without proof. Knows nothing of routing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from gateway.downstream.request import ClientRequest
from gateway.errors import Forbidden, Unauthorized
from gateway.tenants.credentials import common_name_of, credential_of
from gateway.tenants.directory import Directory, digest_of
from gateway.tenants.tenant import Tenant


class Proof(Protocol):
    """A kind of credential that is verified: a token, or a key stored elsewhere."""

    def may_know(self, credential: str) -> bool:
        """Whether a credential looks like this kind. No I/O."""
        ...

    async def prove(self, credential: str, digest: bytes) -> tuple[str, float] | None:
        """Return the tenant's name and for how many seconds to cache it, None if not proved. Raises a
        GatewayError when it cannot be verified now. Bounded in time; safe to cancel."""
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

    def recognise(self, request: ClientRequest) -> Tenant | None:
        """Return the tenant if it is known without waiting, None to ask `prove`. Raises Unauthorized or
        Forbidden."""
        directory = self.directory
        if not directory.is_required:
            return directory.anonymous
        credential = credential_of(request.headers)
        if credential is None:
            return self._by_certificate(request)
        digest = digest_of(credential)
        tenant = directory.by_digest.get(digest)
        if tenant is not None:
            return tenant
        name, until_s = self._remembered.get(digest, ("", 0.0))
        return self._named(name) if until_s > self._clock() else None

    async def prove(self, request: ClientRequest) -> Tenant:
        """Return the tenant of a request whose credential is new. Raises Unauthorized or Forbidden."""
        credential = credential_of(request.headers)
        assert credential is not None, "recognise comes first"
        digest = digest_of(credential)
        for proof in self._proofs:
            if proof.may_know(credential):
                proved = await proof.prove(credential, digest)
                if proved is not None:
                    self._remember(digest, *proved)
                    return self._named(proved[0])
        raise Unauthorized("Incorrect API key provided.")

    def _named(self, name: str) -> Tenant:
        tenant = self.directory.named(name)
        if tenant is None:
            raise Forbidden("The credential is valid, but its tenant is not allowed to use this gateway.")
        return tenant

    def _by_certificate(self, request: ClientRequest) -> Tenant:
        """The TLS listener has verified the certificate already."""
        transport = request.transport
        common_name = None if transport is None else common_name_of(transport.get_extra_info("peercert"))
        tenant = None if common_name is None else self.directory.with_certificate(common_name)
        if tenant is None:
            raise Unauthorized("No API key was provided. Send it as `Authorization: Bearer KEY`.")
        return tenant

    def _remember(self, digest: bytes, name: str, for_s: float) -> None:
        self._remembered[digest] = (name, self._clock() + for_s)
        self._remembered.move_to_end(digest)
        if len(self._remembered) > self._max_remembered:
            self._remembered.popitem(last=False)
