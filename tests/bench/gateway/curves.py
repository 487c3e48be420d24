"""`make bench-curves`: how the gateway's cost grows, and what single options cost.

    python tests/bench/gateway/curves.py [--repetitions 3]

Variants of one group are measured in turn, so only numbers of one group compare. CPU µs per request of the
gateway process, pinned to the last CPU; engine and load have the first. Never asserts: it prints and stores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gateway.bodies import write_bodies
from bench.gateway.measure import Scenario, measure, rss_kb, set_engine, stop, wait_ready
from bench.gateway.run import CACHE, RESULTS, compile_tool, describe, only_run

FIRST_ENGINE_PORT, GATEWAY_PORT = 29_000, 28_150
MOST_BACKENDS = 256
NUM_IDLE = 10_000
DURATION_S = 2.0
KEY = "sk-bench-0123456789"  # what the load generator sends
TENANTS = {
    "tenants": [{"name": "bench", "keys_env": "BENCH_KEYS"}],
    "limits": {"per_tenant": {"requests_per_minute": 100_000_000}},
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One configuration under one load."""

    group: str
    name: str
    bodies: str = "1k"
    num_backends: int = 4
    config: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    *(Variant(group="backends", name=str(number), num_backends=number) for number in (4, 64, MOST_BACKENDS)),
    *(Variant(group="messages in 64 KB", name=str(n), bodies=f"64k-{n}-messages") for n in (2, 200, 2_000)),
    *(Variant(group="body", name=name, bodies=name) for name in ("1k", "16k", "128k", "1m")),
    Variant(group="options", name="default"),
    Variant(group="options", name="access log", config={"log": {"access": True}}),
    Variant(group="options", name="tenants and limits", config=TENANTS),
    Variant(group="options", name="admin and journal", config={"admin": {"port": 0}}),
)


def write_curve_bodies(folder: Path) -> dict[str, Path]:
    files = write_bodies(folder)
    for num_messages in (2, 200, 2_000):
        size = 65_536 // num_messages
        files[f"64k-{num_messages}-messages"] = _write(folder, f"64k-{num_messages}", num_messages, size)
    files["1m"] = _write(folder, "1m", 512, 2_048)
    return files


def _write(folder: Path, name: str, num_messages: int, size: int) -> Path:
    """Sixteen conversations; one JSON object of a message costs about 32 bytes beside its text."""
    path = folder / f"{name}.jsonl"
    lines = []
    for number in range(16):
        text = f"{number} " + "word " * (max(0, size - 40) // 5)
        roles = ["user", "assistant"]
        messages = [{"role": roles[n % 2], "content": text} for n in range(num_messages)]
        lines.append(json.dumps({"model": "mock-model", "user": f"u{number}", "messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def gateway(variant: Variant) -> Iterator[subprocess.Popen[bytes]]:
    folder = CACHE / "run" / "curves"
    folder.mkdir(parents=True, exist_ok=True)
    ports = range(FIRST_ENGINE_PORT, FIRST_ENGINE_PORT + variant.num_backends)
    config: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": GATEWAY_PORT},
        "admin": {"is_enabled": False},
        "log": {"access": False},
        "leaving_notice_s": 0,
        "backends": [{"url": f"http://127.0.0.1:{port}", "engine": "vllm"} for port in ports],
        **variant.config,
    }
    (folder / "homing.yaml").write_text(json.dumps(config))
    environ = {**os.environ, "PYTHONPATH": str(Path.cwd()), "BENCH_KEYS": KEY}
    cpu = str((os.cpu_count() or 1) - 1)
    command = ["taskset", "--cpu-list", cpu, sys.executable, "-m", "gateway.main", "gateway"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--config", str(folder / "homing.yaml")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
        )
    try:
        if not wait_ready(GATEWAY_PORT, 60):
            raise RuntimeError(f"the gateway did not become ready; see {folder / 'log'}")
        time.sleep(1.0)  # all backends have been looked at
        yield process
    finally:
        stop(process)


def measure_variant(variant: Variant, generator: Path, bodies: dict[str, Path]) -> float | None:
    scenario = Scenario(name=variant.name, bodies=variant.bodies, num_connections=32, duration_s=DURATION_S)
    with gateway(variant) as process:
        measure(generator, GATEWAY_PORT, process.pid, scenario, bodies[variant.bodies], "0")  # warm-up
        result = measure(generator, GATEWAY_PORT, process.pid, scenario, bodies[variant.bodies], "0")
    return result.get("cpu_us_per_request")


def measure_idle() -> dict[str, float]:
    """Resident memory per idle connection, for as many as the descriptor limit allows."""
    with gateway(Variant(group="idle", name="idle")) as process:
        before_kb, sockets = rss_kb(process.pid), list[socket.socket]()
        try:
            while len(sockets) < NUM_IDLE:
                sockets.append(socket.create_connection(("127.0.0.1", GATEWAY_PORT), timeout=5))
        except OSError as error:
            print(f"idle connections end at {len(sockets)}: {error}")
        time.sleep(1.0)
        grown_kb = rss_kb(process.pid) - before_kb
        for one in sockets:
            one.close()
    return {"connections": len(sockets), "kb_each": grown_kb / max(1, len(sockets))}


def write_report(environment: dict[str, Any], runs: dict[str, dict[str, list[float]]], idle: Any) -> str:
    lines = ["# How the gateway's cost grows", ""]
    lines += [f"* {name}: {value}" for name, value in environment.items()]
    for group, variants in runs.items():
        lines += ["", f"## {group}", "", "| | CPU µs per request | × the first |", "|---|---|---|"]
        base = None
        for name, values in variants.items():
            if not values:
                lines.append(f"| {name} | not measured | |")
                continue
            middle = statistics.median(values)
            base = base or middle
            spread = f"[{min(values):.0f}..{max(values):.0f}]"
            lines.append(f"| {name} | {middle:.0f} {spread} | {middle / base:.2f} |")
    lines += ["", f"Idle connections: {idle['connections']}, {idle['kb_each']:.1f} KB each."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    environment = describe(arguments) | {
        "command": f"make bench-curves ({arguments.repetitions} repetitions)"
    }
    engine_program, generator = compile_tool("mock_engine"), compile_tool("load_generator")
    bodies = write_curve_bodies(CACHE / "bodies")
    runs: dict[str, dict[str, list[float]]] = {}
    with only_run():
        ports = [str(FIRST_ENGINE_PORT + number) for number in range(MOST_BACKENDS)]
        engine = subprocess.Popen(["taskset", "--cpu-list", "0", str(engine_program), *ports])
        try:
            time.sleep(0.5)
            set_engine(FIRST_ENGINE_PORT, Scenario(name="", bodies="1k", num_connections=1, duration_s=1))
            for repetition in range(arguments.repetitions):
                for variant in VARIANTS:
                    cost = measure_variant(variant, generator, bodies)
                    found = runs.setdefault(variant.group, {}).setdefault(variant.name, [])
                    if cost is not None:
                        found.append(cost)
                        print(f"{repetition} {variant.group:20} {variant.name:20} {cost:9.1f}", flush=True)
            idle = measure_idle()
        finally:
            stop(engine)
    report = write_report(environment, runs, idle)
    RESULTS.mkdir(parents=True, exist_ok=True)
    stored = {"environment": environment, "runs": runs, "idle": idle}
    (RESULTS / "curves.json").write_text(json.dumps(stored, indent=1))
    (RESULTS / "curves.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main()
