"""A whole `homing up` as a user starts it: a gateway and workers as real processes, on free ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from fakes.redis_server import free_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0


def free_ports(count: int) -> list[int]:
    """Different ports; the one above each is free too."""
    found: set[int] = set()
    while len(found) < count:
        port = free_port()
        if not found & {port - 1, port, port + 1}:
            found.add(port)
    return list(found)


class RunningFleet:
    """One `homing up` process."""

    def __init__(self, model: Path, run_dir: Path, num_backends: int = 2) -> None:
        self.port, self.admin_port, self.worker_port = free_ports(3)
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gateway.main", "up", "--backends", str(num_backends)),
                *("--port", str(self.port), "--admin-port", str(self.admin_port)),
                *("--worker-port", str(self.worker_port), "--model", str(model), "--run-dir", str(run_dir)),
                "--worker-args=--kv-memory 64MiB --dtype fp32 --served-model-name tiny",
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.shown = ""
        self.wait_up()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_up(self) -> None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Stop with Ctrl-C" not in self.shown:
            line = self.process.stdout.readline()
            assert line or self.process.poll() is None, self.shown
            assert time.monotonic() < deadline, self.shown
            self.shown += line

    def status(self) -> dict[str, Any]:
        answer = httpx.get(f"http://127.0.0.1:{self.admin_port}/admin/v1/status", timeout=5)
        return {one["id"]: one for one in answer.json()["backends"]}

    def worker_pid(self, number: int) -> int:
        for child in psutil.Process(self.process.pid).children():
            command = child.cmdline()
            if "engine_adapter.server" in command and self.worker_ports[number] in command:
                return child.pid
        raise AssertionError(f"no worker {number}")

    @property
    def worker_ports(self) -> list[str]:
        return [one["url"].rpartition(":")[2] for one in self.status().values()]

    def interrupt(self) -> float:
        """Ctrl-C; returns the seconds until it has ended."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=30)
        return time.monotonic() - started

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
