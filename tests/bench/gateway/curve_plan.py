"""What the curves measure: groups of runs, each of one gateway under one load.

The gateways of a group are started for it and stopped after it; its runs are interleaved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.gateway.bodies import NUM_MESSAGES
from bench.gateway.measure import Scenario
from bench.gateway.peers import (
    VLLM_ROUTER,
    Command,
    Peer,
    homing,
    homing_with_redis,
    nginx,
    redis_beside,
    vllm_router,
)

NUM_BACKENDS = (4, 64, 256)
ENGINE_PORTS = tuple(range(27_001, 27_001 + NUM_BACKENDS[-1]))
URLS = tuple(f"http://127.0.0.1:{port}" for port in ENGINE_PORTS)
STEADY = {"slow_start_s": 0}
STARTING = {"slow_start_s": 3_600}
FEW = URLS[:4]
BODIES = {"1": "1k", "16": "16k", "128": "128k", "1024": "1m"}  # KB -> file


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of a curve: a gateway (`series`) at one value of what varies (`x`)."""

    curve: str
    series: str
    x: str
    peer: Peer
    scenario: Scenario


def _trio(num_backends: int, first_port: int, *, num_processes: int = 1, label: str = "") -> dict[str, Peer]:
    """Homing, vllm-router and nginx with as many backends and processes (threads, workers)."""
    urls = URLS[:num_backends]
    name = label or f"{num_backends} backends"
    ours = homing(urls, routing=STEADY, downstream={"max_connections": 15_000})
    beside: Callable[[Path], list[str]] | None = None
    if label:  # more than one process needs Redis; one has it too, so that one thing varies
        ours, beside = homing_with_redis(urls, routing=STEADY, workers=num_processes), redis_beside
    port, cpus = first_port, num_processes
    return {
        "homing": Peer(name=f"homing, {name}", port=port, command=ours, beside=beside, num_cpus=cpus),
        "vllm-router consistent_hash": Peer(
            name=f"vllm-router, {name}",
            port=port + 1,
            command=vllm_router(urls),
            package=VLLM_ROUTER,
            num_cpus=cpus,
        ),
        "nginx hash": Peer(
            name=f"nginx, {name}",
            port=port + 2,
            command=nginx(urls, num_processes),
            program="nginx",
            num_cpus=cpus,
        ),
    }


def _load(bodies: str, duration_s: float = 1.2) -> Scenario:
    return Scenario(name=bodies, bodies=bodies, num_connections=32, duration_s=duration_s)


def _cells(curve: str, x: object, peers: dict[str, Peer], scenario: Scenario) -> list[Cell]:
    return [
        Cell(curve=curve, series=series, x=str(x), peer=peer, scenario=scenario)
        for series, peer in peers.items()
    ]


def fleets() -> list[Cell]:
    """By number of backends; new sessions also while every backend is in its slow start."""
    cells = []
    for index, count in enumerate(NUM_BACKENDS):
        peers = _trio(count, 28_121 + 4 * index)
        starting = Peer(
            name=f"homing in slow start, {count} backends",
            port=28_124 + 4 * index,
            command=homing(URLS[:count], routing=STARTING),
        )
        cells += _cells("backends", count, peers, _load("1k-many"))
        new = {**peers, "homing in slow start": starting}
        cells += _cells("backends, new sessions", count, new, _load("1k-new"))
    return cells


def loads() -> list[Cell]:
    """By messages, bytes and streams, all with the same gateways."""
    peers, cells = usual(), []
    for count in NUM_MESSAGES:
        cells += _cells("messages", count, peers, _load(f"{count}-messages"))
    for size, bodies in BODIES.items():
        cells += _cells("bytes", size, peers, _load(bodies))
    for count in (100, 1_000):  # one stream on each connection, begun at once: 30 events in 3 s
        streams = Scenario(
            name="streams",
            bodies="1k-many-stream",
            num_connections=count,
            duration_s=0.5,
            delay_us=100_000,
            num_events=30,
        )
        cells += _cells("streams", count, peers, streams)
    return cells


def usual() -> dict[str, Peer]:
    """The gateways with four backends."""
    return _trio(len(FEW), 28_121)


def processes() -> list[Cell]:
    """One and two processes of each gateway."""
    cells = []
    for count in (1, 2):
        peers = _trio(len(FEW), 28_121 + 4 * count, num_processes=count, label=f"{count} processes")
        cells += _cells("processes", count, peers, _load("1k", 2.0))
    return cells


def options() -> list[Cell]:
    """Homing with one option changed at a time; `homing` is the one without any."""
    most = 1_000_000_000
    limits = {"max_in_flight": 10_000, "requests_per_minute": most, "tokens_per_minute": most}
    keys = [
        "sk-bench-0123456789",
        *(f"sk-{number}" for number in range(99)),
    ]  # the load generator sends the first
    tenants = [
        {
            "name": f"tenant-{number}",
            "key_hashes": [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"],
            "limits": limits,
        }
        for number, key in enumerate(keys)
    ]
    variants: dict[str, Command] = {
        "homing": homing(FEW, routing=STEADY),
        "access log": homing(FEW, routing=STEADY, log={"access": True}),
        "100 tenants, limits": homing(FEW, routing=STEADY, tenants=tenants),
        "admin, journal": homing(FEW, routing=STEADY, admin={"is_enabled": True, "port": 28_190}),
        "sessions in Redis": homing_with_redis(FEW, routing=STEADY),
    }
    peers = {
        name: Peer(
            name=f"options, {name}",
            port=28_141 + index,
            command=command,
            beside=redis_beside if name == "sessions in Redis" else None,
            program="redis-server" if name == "sessions in Redis" else None,
        )
        for index, (name, command) in enumerate(variants.items())
    }
    cells = _cells("options", "1 KB", peers, _load("1k"))
    return [
        *cells,
        *_cells("options", "1 KB growing", peers, _load("1k-growing")),
        *_cells("options", "1 KB, new sessions", peers, _load("1k-new")),
    ]


GROUPS: dict[str, Callable[[], list[Cell]]] = {
    "backends": fleets,
    "loads": loads,
    "processes": processes,
    "options": options,
}
