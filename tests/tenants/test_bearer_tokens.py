"""Tokens of an identity provider that publishes its keys over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes.identity_provider import EC, RSA, IdentityProvider, public, token

from gateway.errors import CannotAuthenticate, Unauthorized
from gateway.tenants import provider_keys
from gateway.tenants.bearer_tokens import BearerTokens
from gateway.tenants.provider_keys import MAX_BYTES, parse_key_set
from gateway.tenants.settings import JwtSettings


class World:
    def __init__(self, provider: IdentityProvider, **options: Any) -> None:
        self.provider = provider
        self.now_s = 1000.0
        settings = JwtSettings(
            issuer="https://id.example", audience="homing", jwks_url=provider.url, **options
        )
        self.tokens = BearerTokens(settings, clock=lambda: self.now_s)

    async def tenant(self, token: str) -> str:
        proved = await self.tokens.prove(token.encode(), b"")
        assert proved is not None
        return proved[0]

    async def until_fetched(self, number: int) -> None:
        async with asyncio.timeout(5):
            while self.provider.num_asked < number or not self.tokens._keys._has_fetched.is_set():
                await asyncio.sleep(0.005)


@pytest.fixture
async def provider() -> AsyncIterator[IdentityProvider]:
    provider = IdentityProvider()
    await provider.server.start_server()
    yield provider
    await provider.server.close()


@pytest.fixture
async def world(provider: IdentityProvider) -> AsyncIterator[World]:
    world = World(provider, algorithms=("RS256", "ES256"))
    world.tokens.start()
    await world.until_fetched(1)
    yield world
    await world.tokens.close()


async def test_a_good_token_names_its_tenant(world: World) -> None:
    """With an RSA or an elliptic key, and for no longer than the cache or the token itself lasts."""
    assert await world.tenant(token()) == "team-a"
    assert await world.tenant(token("ec", key=EC, algorithm="ES256")) == "team-a"
    assert (await world.tokens.prove(token().encode(), b"")) == ("team-a", 60.0)
    short = await world.tokens.prove(token(exp=time.time() - 20).encode(), b"")  # within the leeway
    assert short is not None
    assert 0 < short[1] <= 10
    assert await world.tenant(token(exp=str(int(time.time()) + 600))) == "team-a"  # PyJWT reads it, so do we
    assert world.provider.num_asked == 1


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": 1},
        {"exp": None},
        {"iss": "https://evil.example"},
        {"iss": None},
        {"aud": "other"},
        {"aud": None},
        {"nbf": 4e9},
        {"tenant": None},
        {"tenant": 7},
        {"tenant": ""},
    ],
)
async def test_a_token_that_says_anything_else_is_refused(world: World, claims: dict[str, Any]) -> None:
    """Expired, endless, of another issuer, for another audience, not yet valid, of no tenant."""
    with pytest.raises(Unauthorized):
        await world.tokens.prove(token(**claims).encode(), b"")


async def test_a_token_with_another_signature_is_refused(world: World) -> None:
    """Signed by somebody else under a known name, with a public key as a shared secret, or not at all."""
    header, body, signature = token().split(".")
    none = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    shared = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"one"}').rstrip(b"=").decode()
    for bad in (
        token("one", key=RSA["two"]),
        f"{header}.{body}.{signature[:-8]}AAAAAAAA",
        f"{none}.{body}.",
        f"{shared}.{body}.{signature}",
        token(algorithm="RS512"),
    ):
        with pytest.raises(Unauthorized):
            await world.tokens.prove(bad.encode(), b"")
    assert await world.tokens.prove(b"eyJ.x.y", b"") is None


async def test_only_what_looks_like_a_token_is_tried(world: World) -> None:
    """API keys do not cost a parse."""
    assert world.tokens.may_know(token().encode())
    assert not world.tokens.may_know(b"sk-0123456789")
    assert not world.tokens.may_know(b"eyJhbGciOi")
    assert not world.tokens.may_know(b"eyJ\xff.\xfe.x")


async def test_a_token_of_another_issuer_fetches_no_keys(world: World) -> None:
    """Clients bring tokens that are not for us: nobody waits for the key of one."""
    world.now_s += provider_keys.MIN_INTERVAL_S
    with pytest.raises(Unauthorized):
        await world.tokens.prove(token("two", iss="https://vendor.example").encode(), b"")
    assert world.provider.num_asked == 1


async def test_a_new_key_is_fetched_when_a_token_names_it(world: World) -> None:
    """Rotation needs no restart; known keys never wait; invented names cannot make us ask all the time."""
    world.provider.keys = [public("two")]
    with pytest.raises(Unauthorized):
        await world.tokens.prove(token("two").encode(), b"")  # the last fetch is too fresh
    assert world.provider.num_asked == 1
    world.now_s += provider_keys.MIN_INTERVAL_S
    assert await world.tenant(token("two")) == "team-a"
    for _ in range(5):
        with pytest.raises(Unauthorized):
            await world.tokens.prove(token("one").encode(), b"")  # withdrawn
    assert world.provider.num_asked == 2


async def test_with_the_provider_gone_the_last_keys_go_on_counting(world: World) -> None:
    """An outage of the provider is none of ours."""
    world.provider.status = 500
    world.now_s += provider_keys.MIN_INTERVAL_S
    with pytest.raises(Unauthorized):
        await world.tokens.prove(token("two").encode(), b"")
    assert world.provider.num_asked == 2
    assert await world.tenant(token()) == "team-a"


async def test_a_provider_never_reached_is_not_the_clients_fault(provider: IdentityProvider) -> None:
    """503, to be tried again; redirects are not followed, and a huge answer is not read."""
    for status, body in ((500, None), (302, None), (200, b"x" * (MAX_BYTES + 1)), (200, b"[]")):
        provider.status, provider.body = status, body
        world = World(provider)
        provider.num_asked = 0
        world.tokens.start()
        await world.until_fetched(1)
        with pytest.raises(CannotAuthenticate):
            await world.tokens.prove(token().encode(), b"")
        assert provider.num_asked == 1
        await world.tokens.close()


async def test_a_token_without_a_key_name_means_the_only_key(provider: IdentityProvider) -> None:
    """Where there are several it means none."""
    provider.keys = [public("one")]
    world = World(provider)
    world.tokens.start()
    await world.until_fetched(1)
    assert await world.tenant(token(None)) == "team-a"
    await world.tokens.close()


async def test_a_claim_may_lie_deeper_or_have_dots_in_its_name(provider: IdentityProvider) -> None:
    """`a.b` is looked for as a name first, then as member b of a."""
    world = World(provider, tenant_claim="org.name")
    world.tokens.start()
    await world.until_fetched(1)
    assert await world.tenant(token(org={"name": "deep"})) == "deep"
    claims: dict[str, Any] = {"org.name": "flat", "org": {"name": "deep"}}
    assert await world.tenant(token(**claims)) == "flat"
    with pytest.raises(Unauthorized):
        await world.tokens.prove(token(org="text").encode(), b"")
    await world.tokens.close()


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"{}", b'{"keys":1}', b'{"keys":[]}', b'{"keys":[{}]}', b"null"]
)
def test_what_is_no_key_set_is_refused(body: bytes) -> None:
    """The keys in force then stay."""
    with pytest.raises(ValueError, match="not a usable key set"):
        parse_key_set(body)


def test_keys_for_encryption_are_not_taken_for_signatures() -> None:
    """A set may hold both."""
    keys = [public("one"), public("two", use="enc")]
    assert list(parse_key_set(json.dumps({"keys": keys}).encode())) == ["one"]
