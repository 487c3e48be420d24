"""From credentials to a tenant."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from multidict import CIMultiDict

from gateway.downstream.request import ClientRequest
from gateway.errors import Forbidden, Unauthorized
from gateway.limits.settings import TenantLimits
from gateway.tenants.credentials import common_name_of, credential_of
from gateway.tenants.directory import Directory, digest_of
from gateway.tenants.gatekeeper import Gatekeeper
from gateway.tenants.settings import AuthenticationSettings, TenantSettings

KEY = "key-of-tenant-a-0001"
CERTIFICATE = {"subject": ((("organizationName", "X"),), (("commonName", "machine-7"),))}


class Transport:
    def __init__(self, certificate: object = None) -> None:
        self._certificate = certificate

    def get_extra_info(self, name: str) -> object:
        return self._certificate if name == "peercert" else None


class Request:
    """As much of a request as is looked at."""

    def __init__(self, *headers: tuple[str, str], certificate: object = None) -> None:
        self.headers = CIMultiDict(headers)
        self.transport = Transport(certificate)


def request(*headers: tuple[str, str], certificate: object = None) -> ClientRequest:
    return cast(ClientRequest, Request(*headers, certificate=certificate))


def bearer(credential: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {credential}")


class ScriptedProof:
    """A proof that knows some credentials; counts how often it is asked."""

    def __init__(self, **names: str) -> None:
        self.names = names
        self.num_asked = 0

    def may_know(self, credential: str) -> bool:
        return credential.startswith("proof-")

    async def prove(self, credential: str, digest: bytes) -> tuple[str, float] | None:
        self.num_asked += 1
        assert digest == digest_of(credential)
        name = self.names.get(credential.removeprefix("proof-"))
        return None if name is None else (name, 10.0)


class World:
    """A gatekeeper on a manual clock, with tenants `a` (a key, a certificate) and `b` (neither)."""

    def __init__(self, **names: str) -> None:
        self.now_s = 0.0
        self.proof = ScriptedProof(**names)
        self.keeper = Gatekeeper(self.directory("a", "b"), (self.proof,), clock=lambda: self.now_s)

    def directory(self, *names: str) -> Directory:
        settings: list[dict[str, Any]] = [{"name": name} for name in names]
        if "a" in names:
            settings[0] |= {"keys_env": "A", "certificate_names": ["machine-7"]}
        return Directory(
            msgspec.convert(settings, tuple[TenantSettings, ...]),
            AuthenticationSettings(),
            TenantLimits(),
            secret=b"s",
            environ={"A": KEY},
        )

    async def name_of(self, one: ClientRequest) -> str:
        return (self.keeper.recognise(one) or await self.keeper.prove(one)).name


@pytest.mark.parametrize(
    ("headers", "credential"),
    [
        ([bearer(KEY)], KEY),
        ([("authorization", f"bearer   {KEY} ")], KEY),
        ([("X-Api-Key", KEY)], KEY),
        ([bearer(KEY), ("x-api-key", "other")], KEY),
        ([], None),
    ],
)
def test_a_credential_comes_in_one_of_two_headers(
    headers: list[tuple[str, str]], credential: str | None
) -> None:
    """As OpenAI's and Anthropic's SDKs send it; the first of the two counts."""
    assert credential_of(CIMultiDict(headers)) == credential


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Basic abc")],
        [("authorization", KEY)],
        [("authorization", "Bearer")],
        [("authorization", "")],
        [bearer("x" * 20_000)],
        [("x-api-key", "")],
        [bearer(KEY), bearer("other")],
        [("x-api-key", KEY), ("x-api-key", "other")],
    ],
)
def test_what_is_no_credential_is_refused(headers: list[tuple[str, str]]) -> None:
    """Two headers of one name would let us check one and a backend believe the other."""
    with pytest.raises(Unauthorized) as caught:
        credential_of(CIMultiDict(headers))
    assert KEY not in caught.value.message


async def test_a_configured_key_is_known_at_once() -> None:
    """Nobody else is asked."""
    world = World()
    assert await world.name_of(request(bearer(KEY))) == "a"
    assert await world.name_of(request(("x-api-key", KEY))) == "a"
    assert world.proof.num_asked == 0


@pytest.mark.parametrize("headers", [[], [bearer("wrong-key-wrong-key")], [bearer("proof-unknown")]])
async def test_without_proof_there_is_no_tenant(headers: list[tuple[str, str]]) -> None:
    """No key, a wrong one, an unknown one: all get the same answer."""
    with pytest.raises(Unauthorized):
        await World().name_of(request(*headers))


async def test_what_was_proved_is_believed_for_its_time() -> None:
    """Asked once, then again after the time that the proof itself named."""
    world = World(x="b")
    for _ in range(3):
        assert await world.name_of(request(bearer("proof-x"))) == "b"
    assert world.proof.num_asked == 1
    world.now_s = 10.0
    world.proof.names.clear()
    with pytest.raises(Unauthorized):
        await world.name_of(request(bearer("proof-x")))


async def test_a_proved_name_that_is_no_tenant_here_is_forbidden() -> None:
    """Also after a reload that removed it, though the proof still holds."""
    world = World(x="b", y="stranger")
    with pytest.raises(Forbidden):
        await world.name_of(request(bearer("proof-y")))
    assert await world.name_of(request(bearer("proof-x"))) == "b"
    world.keeper.directory = world.directory("a")
    with pytest.raises(Forbidden):
        await world.name_of(request(bearer("proof-x")))


async def test_what_is_remembered_is_bounded() -> None:
    """What proves nothing is not remembered at all; of what does, the oldest goes first."""
    world = World(**{f"n{number}": "b" for number in range(9)})
    world.keeper = Gatekeeper(world.keeper.directory, (world.proof,), clock=lambda: 0.0, max_remembered=8)
    for number in range(9):
        await world.name_of(request(bearer(f"proof-n{number}")))
        with pytest.raises(Unauthorized):
            await world.name_of(request(bearer(f"proof-wrong{number}")))
    assert world.keeper.recognise(request(bearer("proof-n0"))) is None
    assert all(world.keeper.recognise(request(bearer(f"proof-n{number}"))) for number in range(1, 9))


async def test_a_client_certificate_proves_who_one_is_where_no_key_is_sent() -> None:
    """By the common name that a tenant lists; a key, right or wrong, comes first."""
    world = World()
    assert await world.name_of(request(certificate=CERTIFICATE)) == "a"
    with pytest.raises(Unauthorized):
        await world.name_of(request(bearer("wrong-key-wrong-key"), certificate=CERTIFICATE))
    with pytest.raises(Unauthorized):
        await world.name_of(request(certificate={"subject": ((("commonName", "other"),),)}))


def test_common_names_of_certificates() -> None:
    """The last one counts; anything else has none."""
    assert common_name_of(CERTIFICATE) == "machine-7"
    assert common_name_of({"subject": ((("commonName", "x"), ("commonName", "y")),)}) == "y"
    assert common_name_of(None) is None
    assert common_name_of({}) is None
