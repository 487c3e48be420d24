"""From credentials to a tenant."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from gateway.downstream.request import ClientRequest
from gateway.errors import CannotAuthenticate, Forbidden, GatewayError, Unauthorized
from gateway.limits.settings import TenantLimits
from gateway.tenants.credentials import MAX_TRIED, common_name_of, credentials_of
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


def raw(*headers: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in headers]


class Request:
    """As much of a request as is looked at."""

    def __init__(self, *headers: tuple[str, str], certificate: object = None) -> None:
        self.raw_headers = raw(*headers)
        self.transport = Transport(certificate)


def request(*headers: tuple[str, str], certificate: object = None) -> ClientRequest:
    return cast(ClientRequest, Request(*headers, certificate=certificate))


def bearer(credential: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {credential}")


REFUSALS: dict[bytes, GatewayError] = {
    b"proof-expired": Unauthorized("The token has expired."),
    b"proof-unverifiable": CannotAuthenticate("not now", retry_after_s=1),
}


class ScriptedProof:
    """A proof that knows some credentials; counts how often it is asked."""

    def __init__(self, **names: str) -> None:
        self.names = names
        self.num_asked = 0

    def may_know(self, credential: bytes) -> bool:
        return credential.startswith(b"proof-")

    async def prove(self, credential: bytes, digest: bytes) -> tuple[str, float] | None:
        self.num_asked += 1
        assert digest == digest_of(credential)
        if credential in REFUSALS:
            raise REFUSALS[credential]
        name = self.names.get(credential.decode().removeprefix("proof-"))
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
        tenant, _ = self.keeper.recognise(one) or await self.keeper.prove(one)
        return tenant.name


@pytest.mark.parametrize(
    ("headers", "secrets"),
    [
        ([bearer(KEY)], [KEY]),
        ([("authorization", f"bearer   {KEY} ")], [KEY]),
        ([("authorization", KEY)], [KEY]),
        ([("X-Api-Key", KEY)], [KEY]),
        ([("API-Key", KEY)], [KEY]),
        ([bearer("other"), ("x-api-key", KEY)], ["other", KEY]),
        ([("x-api-key", KEY), ("authorization", "Basic abc")], [KEY, "abc"]),
        ([("x-api-key", KEY), ("x-api-key", "other")], [KEY, "other"]),
        ([("authorization", ""), ("x-api-key", ""), ("api-key", KEY)], [KEY]),
        ([("authorization", "Bearer"), ("x-api-key", KEY)], ["Bearer", KEY]),
        ([bearer("x" * 20_000)], []),
        ([("x-other", KEY)], []),
    ],
)
def test_every_place_for_a_credential_is_read(headers: list[tuple[str, str]], secrets: list[str]) -> None:
    """As OpenAI's, Anthropic's and Azure's SDKs send it; what is empty or too long is none."""
    assert [secret.decode() for secret, _ in credentials_of(raw(*headers))] == secrets


def test_few_credentials_are_tried() -> None:
    """Each may cost a look-up."""
    assert len(credentials_of(raw(*[("x-api-key", f"key-{number}") for number in range(9)]))) == MAX_TRIED


@pytest.mark.parametrize(
    "foreign",
    [
        bearer("sk-ant-oat01-foreign-token"),
        bearer("proof-expired"),
        bearer("proof-unverifiable"),
        bearer("proof-stranger"),
        ("authorization", "Basic dXNlcjpwYXNz"),
        ("authorization", "Bearer"),
        ("authorization", ""),
        bearer("\udcff\udcfe"),
        ("x-api-key", "wrong"),
    ],
)
@pytest.mark.parametrize("mine", [KEY, "proof-x"])
async def test_what_comes_beside_a_good_credential_is_no_mistake(foreign: tuple[str, str], mine: str) -> None:
    """Before it or behind it, whatever is wrong with it; the header that proved the tenant is told."""
    good = ("api-key", mine)
    for headers in ((foreign, good), (good, foreign)):
        world = World(x="a", stranger="nobody")
        one = request(*headers)
        tenant, proof = world.keeper.recognise(one) or await world.keeper.prove(one)
        assert (tenant.name, proof) == ("a", (b"api-key", mine.encode()))
        assert world.keeper.recognise(one) == (tenant, proof)


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ([bearer("proof-unverifiable"), ("x-api-key", "wrong")], CannotAuthenticate),
        ([bearer("proof-stranger"), ("x-api-key", "proof-expired")], Forbidden),
        ([("x-api-key", "\udcff")], Unauthorized),
    ],
)
async def test_where_none_is_good_the_most_hopeful_refusal_is_told(
    headers: list[tuple[str, str]], error: type[GatewayError]
) -> None:
    """A client that may be right is not told that it is wrong."""
    with pytest.raises(error):
        await World(stranger="nobody").name_of(request(*headers))


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


async def test_a_client_certificate_proves_who_one_is_where_no_key_does() -> None:
    """By the common name that a tenant lists; a key that proves a tenant comes first."""
    world = World(x="b")
    assert await world.name_of(request(certificate=CERTIFICATE)) == "a"
    assert await world.name_of(request(bearer("wrong-key-wrong-key"), certificate=CERTIFICATE)) == "a"
    assert await world.name_of(request(bearer("proof-x"), certificate=CERTIFICATE)) == "b"
    with pytest.raises(Unauthorized):
        await world.name_of(request(certificate={"subject": ((("commonName", "other"),),)}))


def test_common_names_of_certificates() -> None:
    """The last one counts; anything else has none."""
    assert common_name_of(CERTIFICATE) == "machine-7"
    assert common_name_of({"subject": ((("commonName", "x"), ("commonName", "y")),)}) == "y"
    assert common_name_of(None) is None
    assert common_name_of({}) is None
