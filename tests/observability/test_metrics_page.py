"""The page of a whole gateway: it is what METRICS.md says, and stays bounded under hostile input."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from fakes.backend import openai_answer, reset, respond
from fakes.gateway_world import GatewayWorld
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.config import parse_config
from gateway.observability.metrics import GatewayMetrics
from gateway.observability.series import Series
from gateway.process.gateway import Gateway
from gateway.process.gauges import fleet_metrics
from gateway.values import Backend, BackendId, FleetView

METRICS = Path(__file__).parents[2] / "gateway" / "observability" / "METRICS.md"
ROW = re.compile(r"\| `(\w+)` \| (counter|gauge|histogram) \| ([\w, –]+) \| (.+) \|$")


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Metric → type and labels, as METRICS.md lists them."""
    rows = [ROW.match(line) for line in METRICS.read_text().splitlines()]
    return {
        row[1]: (row[2], () if row[3] == "–" else tuple(row[3].split(", ")))
        for row in rows
        if row is not None
    }


def exposed_name(family: Series[float]) -> str:
    return family.name + ("_total" if family.kind == "counter" else "")


def test_the_list_is_the_registry() -> None:
    """Every metric is documented with its type and labels, and nothing else is."""
    gateway = Gateway(parse_config({}))
    families = gateway.metrics.families()
    assert {exposed_name(one): (one.kind, one.labels) for one in families} == documented()
    assert len({one.name for one in families}) == len(families)


def series(page: str) -> set[tuple[str, ...]]:
    """Every series of the page by name and labels."""
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items())))
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def send_hostile(world: GatewayWorld, number: int) -> None:
    """Requests that try to make up names: paths, methods, models, sessions, ids, keys, broken bodies."""
    odd = f'x{number}"}}\\n{{evil="1'
    quoted = httpx.URL(world.base_url).join(f"/v1/made-up-{number}")
    headers = {
        "x-session-id": f"session-{number}",
        "x-request-id": f"id-{number}",
        "user-agent": f"agent-{number}",
        "authorization": f"Bearer key-{number}",
        "x-homing-affinity": f"forged-{number}",
        "x-homing-backend": f"forged-{number}",
    }
    await world.client.get(quoted, headers=headers)
    await world.client.request(f"MADEUP{number}", "/v1/chat/completions", headers=headers)
    await world.client.post("/v1/chat/completions", content=b"{" + odd.encode(), headers=headers)
    body = {"model": odd, "user": odd, "messages": [{"role": odd, "content": odd}], "prompt_cache_key": odd}
    await world.client.post("/v1/chat/completions", json=body, headers=headers)
    await world.client.post(f"/v1/responses?q={number}", json={"model": "fake-model", "input": odd})


async def test_hostile_names_make_no_series() -> None:
    """After the first few requests of each kind, a thousand made-up names add not one series."""
    async with GatewayWorld(1) as world:
        for number in range(20):
            await send_hostile(world, number)
        before = series((await world.client.get("/metrics")).text)
        for number in range(20, 220):
            await send_hostile(world, number)
        after = series((await world.client.get("/metrics")).text)
    assert after == before


async def test_a_backends_odd_status_is_one_label() -> None:
    """Any three digits may come from a backend; outside of HTTP's range they share a label."""
    async with GatewayWorld(1) as world:
        for status in (200, 299, 418, 599):
            world.backends[0].script(respond(b"{}", status=status))
            await world.chat()
        requests = world.gateway.metrics.requests
        assert set(requests) == {
            ("chat", "200", "complete"),
            ("chat", "299", "complete"),
            ("chat", "418", "complete"),
            ("chat", "599", "failed_before_content"),
        }


async def test_what_the_gateway_answers_itself_is_counted() -> None:
    """Lists of models, and refusals before there is an API to speak of: once each, with their status."""
    tenants = [{"name": "a", "keys_env": "KEYS"}]
    async with GatewayWorld(1, tenants=tenants, environ={"KEYS": "k" * 20}) as world:
        key = {"authorization": "Bearer " + "k" * 20}
        models = await world.client.get("/v1/models", headers={**key, "x-request-id": "mine"})
        assert (models.status_code, models.headers["x-request-id"]) == (200, "mine")
        assert (await world.client.get("/v1/models")).status_code == 401
        assert (await world.client.get("/made/up")).status_code == 404
        assert (await world.client.get("/v1/chat/completions", headers=key)).status_code == 405
        assert (await world.chat("s", headers=key)).status_code == 200
        metrics = world.gateway.metrics
        assert dict(metrics.requests) == {
            ("models", "200", "complete"): 1.0,
            ("models", "401", "not_sent"): 1.0,
            ("other", "404", "not_sent"): 1.0,
            ("other", "405", "not_sent"): 1.0,
            ("chat", "200", "complete"): 1.0,
        }
        assert sum(metrics.errors.values()) == 3


async def test_recomputed_tokens_have_a_cause() -> None:
    """A moved session's history is counted under the reason of its move, not as an eviction."""
    async with GatewayWorld(2) as world:
        for backend in world.backends:
            backend.default = openai_answer("x" * 2000)
        first = await world.chat("s", text="hello " * 200)
        home = int(first.headers["x-homing-backend"].removeprefix("b"))
        world.backends[home].script(reset(), reset())  # the second, where a kept connection was tried first
        second = await world.chat("s", text="hello " * 200)
        assert second.headers["x-homing-affinity"] == "failover"
        recomputed = world.gateway.metrics.recomputed_tokens
        assert [labels[1] for labels in recomputed] == ["failover"]
        assert world.gateway.metrics.retries["upstream_reset"] == 1
        assert world.gateway.metrics.upstream_errors[f"b{home}", "upstream_reset"] == 1
        assert sum(world.gateway.metrics.moves.values()) == 1


async def test_the_open_metrics_page_is_valid() -> None:
    """The whole page of a live gateway passes the library's strict parser; both listeners show it."""
    async with GatewayWorld(2) as world:
        await world.chat("s", stream=True)
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        for client in (world.client, world.admin):
            answer = await client.get("/metrics", headers=accept)
            assert answer.headers["content-type"].startswith("application/openmetrics-text")
            families = {one.name: one for one in parse_open_metrics(answer.text)}
            assert "homing_requests" in families
            assert "process_cpu_seconds" in families


def test_a_page_of_a_thousand_backends_is_bounded() -> None:
    """Under a megabyte with every series of a thousand backends; sessions are not on it at all."""
    backend_ids = [BackendId(f"backend-{number:04}") for number in range(1000)]
    view = FleetView(
        backends={one: Backend(backend_id=one, base_url="http://10.0.0.1:8000") for one in backend_ids}
    )
    metrics = GatewayMetrics()
    metrics.add_state(lambda: fleet_metrics(view, lambda _: 3))
    for backend_id in backend_ids:
        for counter in (metrics.prompt_tokens, metrics.cached_tokens, metrics.expected_tokens):
            counter[backend_id] += 123_456
        metrics.completion_tokens[backend_id] += 1
        metrics.recomputed_tokens[backend_id, "evicted"] += 1
    page = metrics.page()[0]
    assert page.count(b"backend-0999") == 14
    assert len(page) < 1_000_000


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_scrape_counts_no_request(method: str) -> None:
    """Looking at the numbers does not change them."""
    async with GatewayWorld(1) as world:
        await world.client.request(method, "/metrics")
        assert not world.gateway.metrics.requests
