"""Tokens and client certificates on the wire."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fakes.certificates import Authority
from fakes.gateway_world import GatewayWorld
from fakes.identity_provider import IdentityProvider, token

from gateway.limits.allowance import Allowance

KEY = "key-of-tenant-a-0001"
CHAT = "/v1/chat/completions"
BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}


def bearer(credential: str) -> dict[str, str]:
    return {"authorization": f"Bearer {credential}"}


def accepting(provider: IdentityProvider, **options: Any) -> dict[str, Any]:
    jwt = {"issuer": "https://id.example", "audience": "homing", "jwks_url": provider.url, **options}
    return {"authentication": {"jwt": jwt}, "tenants": [{"name": "team-a", "models": ["fake-model"]}]}


async def fetched(world: GatewayWorld) -> None:
    """Wait until the gateway has the provider's keys."""
    async with asyncio.timeout(5):
        while (await world.chat(headers=bearer(token()))).status_code == 503:
            await asyncio.sleep(0.01)


async def test_a_token_of_the_provider_gets_in() -> None:
    """A listed tenant is served, an unlisted one forbidden, a bad token unauthorized; tokens stop here."""
    provider = IdentityProvider()
    await provider.server.start_server()
    async with GatewayWorld(num_backends=1, **accepting(provider)) as world:
        await fetched(world)
        assert (await world.chat("s", headers=bearer(token()))).status_code == 200
        assert world.backends[0].requests[-1].header("authorization") is None
        answers = [
            await world.chat("s", headers=bearer(credential))
            for credential in (token(tenant="team-x"), token(exp=time.time() - 100), "eyJ.x.y")
        ]
        assert [answer.status_code for answer in answers] == [403, 401, 401]
        assert "expired" in answers[1].json()["error"]["message"]
        world.assert_idle()
    await provider.server.close()


@pytest.mark.parametrize(
    "odd", [b"\xff\xfe", b"eyJ\xff.eyJ\xfe.x", b"eyJhbGciOiJSUzI1NiJ9./w.x", b"eyJ.\xff.x"]
)
async def test_a_token_that_is_no_text_is_only_a_wrong_one(odd: bytes) -> None:
    """S07: 401, and nothing at all beside a good one."""
    provider = IdentityProvider()
    await provider.server.start_server()
    async with GatewayWorld(num_backends=1, **accepting(provider)) as world:
        await fetched(world)
        headers: Any = [(b"authorization", b"Bearer " + odd)]
        assert (await world.client.post(CHAT, json=BODY, headers=headers)).status_code == 401
        both = [*headers, (b"x-api-key", token().encode())]
        assert (await world.client.post(CHAT, json=BODY, headers=both)).status_code == 200
    await provider.server.close()


async def test_a_foreign_token_beside_a_good_one_waits_for_nobody() -> None:
    """N07: its issuer is not ours, so its unknown key is not fetched; nor is it forwarded."""
    provider = IdentityProvider()
    await provider.server.start_server()
    async with GatewayWorld(num_backends=1, **accepting(provider)) as world:
        await fetched(world)
        num_asked = provider.num_asked
        foreign = token("two", iss="https://vendor.example")
        headers = bearer(foreign) | {"api-key": token()}
        assert (await world.client.post(CHAT, json=BODY, headers=headers)).status_code == 200
        assert provider.num_asked == num_asked
        assert foreign.encode() not in world.backends[0].requests[-1].head
        expired = bearer(token(exp=time.time() - 100)) | {"x-api-key": token()}
        assert (await world.client.post(CHAT, json=BODY, headers=expired)).status_code == 200
    await provider.server.close()


async def test_a_known_token_needs_no_provider() -> None:
    """With the provider gone, tokens signed with the keys it had published are served."""
    provider = IdentityProvider()
    await provider.server.start_server()
    async with GatewayWorld(num_backends=1, **accepting(provider)) as world:
        await fetched(world)
        await provider.server.close()
        assert (await world.chat("s", headers=bearer(token(nonce=1)))).status_code == 200


async def test_a_client_certificate_names_the_tenant(tmp_path: Path) -> None:
    """Behind mTLS: one listed name gets in without a key, another one does not."""
    authority = Authority(tmp_path)
    for name in ("server", "machine-7", "machine-8"):
        authority.issue(name, "IP:127.0.0.1")
    tls = {
        "cert_file": authority.path("server.pem"),
        "key_file": authority.path("server.key"),
        "client_ca_file": authority.path("ca.pem"),
    }
    async with GatewayWorld(
        num_backends=1,
        listen={"port": 0, "tls": tls},
        tenants=[{"name": "batch", "certificate_names": ["machine-7"]}],
    ) as world:
        statuses = []
        for name in ("machine-7", "machine-8"):
            context = ssl.create_default_context(cafile=authority.path("ca.pem"))
            context.load_cert_chain(authority.path(f"{name}.pem"), authority.path(f"{name}.key"))
            url = f"https://127.0.0.1:{world.gateway.port}"
            async with httpx.AsyncClient(base_url=url, verify=context, timeout=10) as client:
                statuses.append((await client.post(CHAT, json=BODY)).status_code)
        assert statuses == [200, 401]


async def test_a_reload_takes_new_keys_from_a_file_that_changed(tmp_path: Path) -> None:
    """The options are the same, the file is not: the old key ends, the new one works, sessions stay."""
    file = tmp_path / "keys"
    file.write_text(KEY)
    async with GatewayWorld(num_backends=1, tenants=[{"name": "a", "keys_file": str(file)}]) as world:
        assert (await world.chat("s", headers=bearer(KEY))).headers["x-homing-affinity"] == "new"
        file.write_text("another-key-of-a-01")
        assert (await world.gateway.reloader.reload()).outcome == "unchanged"
        assert (await world.chat("s", headers=bearer(KEY))).status_code == 401
        again = await world.chat("s", headers=bearer("another-key-of-a-01"))
        assert again.headers["x-homing-affinity"] == "hit"
        file.write_text("short")
        assert (await world.gateway.reloader.reload()).outcome == "rejected"
        assert (await world.chat("s", headers=bearer("another-key-of-a-01"))).status_code == 200


async def test_the_official_clients_understand_our_refusals() -> None:
    """Each raises its own error; none repeats what cannot succeed, nor what is too far away."""
    tenants = [
        {"name": "a", "keys_env": "A", "models": ["fake-model"], "limits": {"requests_per_minute": 600}}
    ]
    async with GatewayWorld(num_backends=1, environ={"A": KEY}, tenants=tenants) as world:
        url = world.base_url
        messages: Any = [{"role": "user", "content": "x"}]
        async with (
            openai.AsyncOpenAI(api_key=KEY, base_url=f"{url}/v1") as client,
            openai.AsyncOpenAI(api_key="wrong-key-wrong-key", base_url=f"{url}/v1") as stranger,
            anthropic.AsyncAnthropic(api_key="wrong-key-wrong-key", base_url=url) as claude,
        ):
            with pytest.raises(openai.AuthenticationError):
                await stranger.chat.completions.create(model="fake-model", messages=messages)
            with pytest.raises(anthropic.AuthenticationError):
                await claude.messages.create(model="fake-model", messages=messages, max_tokens=1)
            with pytest.raises(openai.NotFoundError, match="may not use it"):
                await client.chat.completions.create(model="other", messages=messages)
            assert not world.backends[0].requests
            limiter = world.gateway.limiter
            raw = await client.chat.completions.with_raw_response.create(
                model="fake-model", messages=messages
            )
            assert raw.headers["x-ratelimit-limit-requests"] == "600"
            limiter._uses["a"].adopt(Allowance(requests_left=-10_000.0), time.monotonic())  # 1,000 s away
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="fake-model", messages=messages)
            assert limiter.rejections["tenant_requests"] == 1
