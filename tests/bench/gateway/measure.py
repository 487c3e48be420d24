"""One measurement: run the load against one port and see what CPU the process tree behind it spent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One kind of load."""

    name: str
    bodies: str  # of `bodies.write_bodies`
    num_connections: int
    duration_s: float
    delay_us: int = 0  # between events
    num_events: int = 64

    @property
    def is_stream(self) -> bool:
        return self.bodies.endswith("-stream")


SCENARIOS = (
    Scenario(name="1 KB", bodies="1k", num_connections=32, duration_s=2.5),
    Scenario(name="16 KB", bodies="16k", num_connections=32, duration_s=2.5),
    Scenario(name="128 KB", bodies="128k", num_connections=32, duration_s=2.5),
    Scenario(name="1 KB growing", bodies="1k-growing", num_connections=32, duration_s=2.5),
    Scenario(name="16 KB growing", bodies="16k-growing", num_connections=32, duration_s=2.5),
    Scenario(name="128 KB growing", bodies="128k-growing", num_connections=32, duration_s=2.5),
    Scenario(name="1 KB, one client", bodies="1k", num_connections=1, duration_s=2.0),
    Scenario(name="128 KB, one client", bodies="128k", num_connections=1, duration_s=2.0),
    Scenario(name="stream", bodies="1k-stream", num_connections=32, duration_s=3.0, delay_us=10_000),
    Scenario(name="streams", bodies="1k-stream", num_connections=256, duration_s=3.0, delay_us=25_000),
    Scenario(
        name="stream, one client", bodies="1k-stream", num_connections=1, duration_s=3.0, delay_us=2_000
    ),
    Scenario(name="stream flood", bodies="1k-stream", num_connections=32, duration_s=2.5),
)


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    found, waiting = [], [pid]
    while waiting:
        current = waiting.pop()
        found.append(current)
        try:
            for thread in Path(f"/proc/{current}/task").iterdir():
                waiting += [int(child) for child in (thread / "children").read_text().split()]
        except OSError:
            continue  # it ended meanwhile
    return found


def cpu_s(pid: int) -> float:
    """User and system time of the process tree so far."""
    ticks = 0
    for process in process_tree(pid):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def rss_kb(pid: int) -> int:
    total = 0
    for process in process_tree(pid):
        try:
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total


def wait_ready(port: int, timeout_s: float) -> bool:
    """Until one chat request is answered with 200."""
    body = json.dumps({"model": "mock-model", "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {
        "content-type": "application/json",
        "x-session-id": "s",
        "authorization": "Bearer sk-bench-0123456789",
    }
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                if answer.status == 200:
                    return True
        except OSError:
            time.sleep(0.3)
    return False


def set_engine(port: int, scenario: Scenario) -> None:
    url = f"http://127.0.0.1:{port}/_mock/set?events={scenario.num_events}&delay_us={scenario.delay_us}"
    urllib.request.urlopen(url, timeout=5).close()


def run_load(generator: Path, port: int, scenario: Scenario, bodies: Path, cpu: str) -> dict[str, Any]:
    command = [
        "taskset",
        "--cpu-list",
        cpu,
        str(generator),
        str(port),
        str(scenario.num_connections),
        str(scenario.duration_s),
        str(bodies),
    ]
    timeout_s = scenario.duration_s + 40  # the generator gives what runs 20 s to finish
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"failure": f"the load generator did not end in {timeout_s:.0f} s"}
    if done.returncode != 0:
        return {"failure": done.stderr.strip()[-300:]}
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def measure(
    generator: Path, port: int, pid: int, scenario: Scenario, bodies: Path, cpu: str
) -> dict[str, Any]:
    """One run with the CPU it cost. `failure` says why there is none."""
    before_s = cpu_s(pid)
    result = run_load(generator, port, scenario, bodies, cpu)
    spent_us = (cpu_s(pid) - before_s) * 1e6
    if "failure" in result:
        return result
    if not result["num_done"]:
        return {"failure": "no request was answered"}
    result["cpu_us_per_request"] = spent_us / result["num_done"]
    if result["num_events"]:
        result["cpu_us_per_event"] = spent_us / result["num_events"]
    result["requests_per_s"] = result["num_done"] / result["elapsed_s"]
    result["rss_kb"] = rss_kb(pid)
    return result


def stop(process: subprocess.Popen[bytes]) -> None:
    """End one of our own process trees, which was started in a session of its own."""
    for pid in process_tree(process.pid) if process.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
    with suppress(ProcessLookupError):  # what has not ended, or was left behind
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
