"""Discovery: what sources say becomes the fleet, and what they fail to say changes nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fakes.gateway_world import GatewayWorld, ProbedBackend

from gateway.config.config import parse_config
from gateway.fleet.discovery import Discovery
from gateway.fleet.discovery_sources import BackendFile, DnsLookup, EndpointSlices, SourceUnavailable
from gateway.fleet.registry import Fleet
from gateway.fleet.settings import BackendSettings, DnsSource, FileSource, KubernetesSource, backend_of
from gateway.routing.health import HealthSettings


class ScriptedSource:
    """Answers with what the test sets: a list of urls, or an error."""

    def __init__(self, *urls: str) -> None:
        self.name = "scripted"
        self.urls: tuple[str, ...] | None = urls

    async def find(self) -> list[BackendSettings]:
        if self.urls is None:
            raise SourceUnavailable("scripted")
        return [BackendSettings(url=url) for url in self.urls]


def make_fleet() -> Fleet:
    return Fleet(HealthSettings())


def make_discovery(fleet: Fleet, *sources: Any) -> Discovery:
    def join(settings: BackendSettings) -> None:
        fleet.add(backend_of(settings))

    return Discovery(sources, fleet, join, interval_s=60, timeout_s=0.05)


def urls(fleet: Fleet) -> set[str]:
    return {backend.base_url for backend in fleet.view.backends.values()}


async def test_backends_come_and_go_with_the_answers_of_a_source() -> None:
    """New ones are added, missing ones removed, and those that stay are not touched."""
    fleet, source = make_fleet(), ScriptedSource("http://a:1", "http://b:1")
    discovery = make_discovery(fleet, source)
    await discovery.look()
    stays = fleet.view.get(next(one for one in fleet.view.backends if one.startswith("b")))
    source.urls = ("http://b:1", "http://c:1")
    await discovery.look()
    assert urls(fleet) == {"http://b:1", "http://c:1"}
    assert stays in fleet.view.backends.values()


async def test_a_failing_source_changes_nothing() -> None:
    """Neither an error nor silence empties the fleet, and the next answer counts as before."""
    fleet, source = make_fleet(), ScriptedSource("http://a:1", "http://b:1")
    discovery = make_discovery(fleet, source)
    await discovery.look()
    source.urls = None
    await discovery.look()
    assert urls(fleet) == {"http://a:1", "http://b:1"}
    source.urls = ("http://a:1",)
    await discovery.look()
    assert urls(fleet) == {"http://a:1"}


async def test_a_silent_source_holds_nobody_up() -> None:
    """A source that never answers is given up after its time; the others are asked all the same."""

    class Silent(ScriptedSource):
        async def find(self) -> list[BackendSettings]:
            await asyncio.Event().wait()
            return []

    fleet = make_fleet()
    await make_discovery(fleet, Silent(), ScriptedSource("http://a:1")).look()
    assert urls(fleet) == {"http://a:1"}


async def test_a_broken_source_keeps_no_other_from_being_asked(caplog: pytest.LogCaptureFixture) -> None:
    """An error that nobody foresaw is logged with its stack, and the next source has its turn."""

    class Broken(ScriptedSource):
        async def find(self) -> list[BackendSettings]:
            raise ValueError("a bug")

    fleet = make_fleet()
    await make_discovery(fleet, Broken(), ScriptedSource("http://a:1")).look()
    assert urls(fleet) == {"http://a:1"}
    assert "a bug" in caplog.text


async def test_what_others_brought_is_left_alone() -> None:
    """A configured backend at a discovered address is neither doubled nor, later, removed."""
    fleet, source = make_fleet(), ScriptedSource("http://a:1", "http://b:1")
    fleet.add(backend_of(BackendSettings(id="mine", url="http://a:1")))
    discovery = make_discovery(fleet, source)
    await discovery.look()
    assert len(fleet.view.backends) == 2
    source.urls = ("http://b:1",)
    await discovery.look()
    assert "mine" in fleet.view.backends


async def test_a_configured_backend_of_the_same_name_is_not_the_sources() -> None:
    """Names are made from addresses, so both call it alike: the source may neither change nor remove it."""
    fleet, source = make_fleet(), ScriptedSource("http://a:1", "http://b:1")
    configured = BackendSettings(url="http://a:1")
    fleet.add(backend_of(configured))
    discovery = make_discovery(fleet, source)
    await discovery.look()
    source.urls = ("http://b:1",)
    await discovery.look()
    assert urls(fleet) == {"http://a:1", "http://b:1"}


async def test_an_operators_removal_holds_until_the_source_names_it_anew() -> None:
    """Removed by hand: not added again by the next round, but when it went and came back."""
    fleet, source = make_fleet(), ScriptedSource("http://a:1", "http://b:1")
    discovery = make_discovery(fleet, source)
    await discovery.look()
    fleet.remove(next(one for one in fleet.view.backends if one.startswith("a")))
    await discovery.look()
    assert urls(fleet) == {"http://b:1"}
    source.urls = ("http://b:1",)
    await discovery.look()
    source.urls = ("http://a:1", "http://b:1")
    await discovery.look()
    assert urls(fleet) == {"http://a:1", "http://b:1"}


# -- DNS


def row(address: str) -> Any:
    """As `socket.getaddrinfo` gives it."""
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, 8000, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 8000))


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["10.0.0.2", "10.0.0.1", "10.0.0.1"], ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]),
        (["fd00::1", "10.0.0.1"], ["http://10.0.0.1:8000"]),
        (["fd00::1"], ["http://[fd00::1]:8000"]),
    ],
)
async def test_each_address_of_a_name_is_a_backend(addresses: list[str], expected: list[str]) -> None:
    """Repeated addresses count once; of a dual-stack name only IPv4 is used."""

    async def resolve(host: str, port: int) -> list[Any]:
        assert (host, port) == ("vllm", 8000)
        return [row(address) for address in addresses]

    found = await DnsLookup(DnsSource(host="vllm", engine="sglang"), resolve).find()
    assert [one.url for one in found] == expected
    assert {one.engine for one in found} == {"sglang"}
    assert all(one.backend_id for one in found)


async def test_a_name_that_does_not_resolve_is_an_unavailable_source() -> None:
    """The real resolver: a name that cannot exist."""
    with pytest.raises(SourceUnavailable, match=r"nowhere\.invalid"):
        await DnsLookup(DnsSource(host="nowhere.invalid")).find()


async def test_the_real_resolver_finds_loopback() -> None:
    """`localhost` is one backend, whatever families it has."""
    assert len(await DnsLookup(DnsSource(host="localhost", port=8000)).find()) == 1


# -- files


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[{url: 'http://a:1'",
        "[{url: 'http://a:1', weigth: 2}]",
        "{url: 'http://a:1'}",
        "[{url: 'ftp://a'}]",
    ],
)
async def test_a_wrong_file_is_an_unavailable_source(tmp_path: Path, text: str) -> None:
    """Empty, half written, misspelt, no list, bad url: the last good list stays."""
    path = tmp_path / "backends.yaml"
    path.write_text(text)
    with pytest.raises(SourceUnavailable, match=r"backends\.yaml"):
        await BackendFile(FileSource(path=str(path))).find()


async def test_a_file_that_is_not_there_is_an_unavailable_source(tmp_path: Path) -> None:
    """The message names it."""
    with pytest.raises(SourceUnavailable, match="cannot read"):
        await BackendFile(FileSource(path=str(tmp_path / "none.yaml"))).find()


async def test_a_gateway_follows_a_file_while_it_serves(tmp_path: Path) -> None:
    """Whole gateway: a backend written into the file serves, the one taken out gets no request more."""
    path = tmp_path / "backends.yaml"
    async with ProbedBackend() as one, ProbedBackend() as two:
        path.write_text(json.dumps([{"id": "one", "url": one.base_url, "engine": "vllm"}]))
        discovery = {"files": [{"path": str(path)}], "interval_s": 0.02}
        async with GatewayWorld(num_backends=0, fleet={"discovery": discovery}) as world:
            backends = world.gateway.fleet
            await world.wait_for(
                lambda: [b.state.value for b in backends.view.backends.values()] == ["ready"]
            )
            assert (await world.chat("alice")).headers["x-homing-backend"] == "one"
            path.write_text(json.dumps([{"id": "two", "url": two.base_url, "engine": "vllm"}]))
            await world.wait_for(lambda: list(backends.view.backends) == ["two"])
            await world.wait_for(
                lambda: [b.state.value for b in backends.view.backends.values()] == ["ready"]
            )
            answer = await world.chat("alice")
            assert (answer.headers["x-homing-backend"], answer.headers["x-homing-affinity"]) == (
                "two",
                "moved",
            )
            path.write_text("[]")
            await world.wait_for(lambda: not backends.view.backends)


# -- Kubernetes


def slices(*pods: tuple[str, str, bool | None], port: int = 8000, kind: str = "IPv4") -> dict[str, Any]:
    """One EndpointSlice as the API gives it; of each pod name, address and readiness."""
    return {
        "kind": "EndpointSlice",
        "addressType": kind,
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {} if ready is None else {"ready": ready, "serving": True},
                "targetRef": {"kind": "Pod", "name": name},
            }
            for name, address, ready in pods
        ],
    }


class FakeKubernetes:
    """The one path of the API server that discovery asks, on a real socket."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.status = 200
        self.requests: list[web.Request] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        return web.json_response({"kind": "EndpointSliceList", "items": self.items}, status=self.status)


@pytest.fixture
async def kubernetes() -> AsyncIterator[FakeKubernetes]:
    fake = FakeKubernetes()
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", fake.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """A service account's files."""
    (tmp_path / "token").write_text("secret-token\n")
    (tmp_path / "namespace").write_text("models")
    return tmp_path


async def test_ready_pods_are_backends_under_their_names(kubernetes: FakeKubernetes, account: Path) -> None:
    """Not ready (also terminating) is left out; no condition means ready; asked with the account's token."""
    kubernetes.items = [
        slices(("vllm-a", "10.0.0.1", True), ("vllm-b", "10.0.0.2", False)),
        slices(("vllm-a", "fd00::1", True), kind="IPv6"),
        slices(("vllm-c", "10.0.0.3", None), port=9000),
    ]
    source = EndpointSlices(KubernetesSource(service="vllm"), {}, account, kubernetes.url)
    found = {one.id: one.url for one in await source.find()}
    assert found == {"vllm-a": "http://10.0.0.1:8000", "vllm-c": "http://10.0.0.3:9000"}
    request = kubernetes.requests[0]
    assert request.headers["authorization"] == "Bearer secret-token"
    assert request.match_info["namespace"] == "models"
    assert request.query["labelSelector"] == "kubernetes.io/service-name=vllm"


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
async def test_a_refusing_api_is_an_unavailable_source(
    kubernetes: FakeKubernetes, account: Path, status: int
) -> None:
    """Missing rights and a broken API server do not empty the fleet."""
    kubernetes.status = status
    source = EndpointSlices(KubernetesSource(service="vllm", namespace="other"), {}, account, kubernetes.url)
    with pytest.raises(SourceUnavailable, match=str(status)):
        await source.find()
    assert kubernetes.requests[0].match_info["namespace"] == "other"


async def test_a_service_without_ready_pods_is_an_unavailable_source(
    kubernetes: FakeKubernetes, account: Path
) -> None:
    """Whether the pods are gone or only busy, the probes know better."""
    kubernetes.items = [slices(("vllm-a", "10.0.0.1", False)), {"endpoints": None}]
    with pytest.raises(SourceUnavailable, match="no ready pod"):
        await EndpointSlices(KubernetesSource(service="vllm"), {}, account, kubernetes.url).find()


async def test_outside_a_cluster_the_source_says_so(tmp_path: Path) -> None:
    """No service account: unavailable, with the missing file's name."""
    with pytest.raises(SourceUnavailable, match="token"):
        await EndpointSlices(KubernetesSource(service="vllm"), {}, tmp_path).find()


@pytest.mark.parametrize(
    "discovery",
    [
        {"dns": [{"host": "a", "port": 0}]},
        {"interval_s": 0},
        {"kubernetes": [{"service": "a", "port": 70000}]},
        {"dns": [{"host": "a", "engine": "vlm"}]},
        {"kubernetes": [{"service": "a", "weight": -1}]},
    ],
)
def test_senseless_options_are_refused(discovery: dict[str, Any]) -> None:
    """With the path of the option."""
    with pytest.raises(Exception, match=r"fleet\.discovery"):
        parse_config({"fleet": {"discovery": discovery}})
