"""Several processes of one machine show one set of numbers: `gateway.observability.worker_reports`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from fakes.gateway_world import ProbedBackend
from fakes.redis_server import free_port, redis_server, require_redis_server
from prometheus_client.parser import text_string_to_metric_families

from gateway.observability.metrics import GatewayMetrics
from gateway.observability.series import Gauge
from gateway.observability.worker_reports import SILENT_AFTER_S, WorkerReports, shared_folder

ROOT = Path(__file__).parents[2]


class Clock:
    """A clock that is set by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Member:
    """One process with one counter and one gauge, as far as its worker_reports can tell."""

    def __init__(self, folder: Path, number: int, clock: Clock) -> None:
        self.metrics = GatewayMetrics(WorkerReports(folder, number, clock=clock))
        self.metrics.add_state(self._state)
        self.num_in_flight = 0

    def _state(self) -> tuple[Gauge]:
        gauge = Gauge("homing_requests_in_flight", "text", is_summed=True)
        gauge[()] = self.num_in_flight
        return (gauge,)

    def serve(self) -> None:
        self.metrics.requests["chat", "200", "complete"] += 1
        self.metrics.duration.observe(0.2, "chat")

    def shown(self) -> dict[str, float]:
        """Sample name with labels → number, as on the page."""
        return {
            ".".join((sample.name, *sample.labels.values())): sample.value
            for family in text_string_to_metric_families(self.metrics.page()[0].decode())
            for sample in family.samples
        }


def test_each_page_shows_the_whole_machine(tmp_path: Path) -> None:
    """Counters, histograms and summed gauges of all processes are added up on every page."""
    clock = Clock()
    members = [Member(tmp_path, number, clock) for number in range(3)]
    for number, member in enumerate(members):
        member.num_in_flight = number
        for _ in range(number + 1):
            member.serve()
        member.shown()  # reports
    for member in members:
        shown = member.shown()
        assert shown["homing_requests_total.chat.200.complete"] == 6
        assert shown["homing_request_duration_seconds_count.chat"] == 6
        assert shown["homing_requests_in_flight"] == 3
        assert member.metrics.value(member.metrics.requests, ("chat", "200", "complete")) == 6
        assert member.metrics.totals(member.metrics.requests) == {"chat": 6}
        assert member.metrics.elsewhere("homing_requests_in_flight") == 3 - member.num_in_flight


def test_states_of_a_silent_process_do_not_count(tmp_path: Path) -> None:
    """What a dead process had in flight is gone; what it had counted stays."""
    clock = Clock()
    dead, alive = Member(tmp_path, 0, clock), Member(tmp_path, 1, clock)
    dead.num_in_flight = 7
    dead.serve()
    dead.shown()
    assert alive.shown()["homing_requests_in_flight"] == 7
    clock.now_s += SILENT_AFTER_S + 1
    assert alive.shown()["homing_requests_in_flight"] == 0
    assert alive.shown()["homing_requests_total.chat.200.complete"] == 1


@pytest.mark.parametrize("seed", range(5))
def test_counters_never_go_backwards(tmp_path: Path, seed: int) -> None:
    """Whoever is asked, and whoever is killed and started anew in between, a total only grows."""
    chance, clock = random.Random(seed), Clock()
    members = [Member(tmp_path, number, clock) for number in range(3)]
    last = 0.0
    for _ in range(60):
        number = chance.randrange(3)
        match chance.choice(("serve", "serve", "show", "restart")):
            case "serve":
                members[number].serve()
            case "restart":  # killed: what it has not reported is lost, what it has is not
                members[number] = Member(tmp_path, number, clock)
            case "show":
                total = members[number].shown().get("homing_requests_total.chat.200.complete", 0.0)
                assert total >= last
                last = total
        clock.now_s += 0.1


def test_a_torn_report_is_ignored(tmp_path: Path) -> None:
    """A file that is no report costs its process's numbers, never the page."""
    (tmp_path / "1.report").write_bytes(b"\xc1 torn")
    member = Member(tmp_path, 0, Clock())
    member.serve()
    assert member.shown()["homing_requests_total.chat.200.complete"] == 1


def test_the_folder_is_private_and_goes_with_the_block() -> None:
    """Nobody else may read or write the reports, and nothing is left behind."""
    with shared_folder() as folder:
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "0.report").write_bytes(b"x")
    assert not folder.exists()


async def total_requests(client: httpx.AsyncClient, admin_port: int) -> float:
    page = (await client.get(f"http://127.0.0.1:{admin_port}/metrics")).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        if family.name == "homing_requests"
        for sample in family.samples
        if sample.labels["api"] == "chat"
    )


async def wait_for_total(client: httpx.AsyncClient, admin_port: int, wanted: float) -> None:
    """Until a process shows this many: what the other has counted arrives with its next report."""
    async with asyncio.timeout(60):
        while await total_requests(client, admin_port) < wanted:
            await asyncio.sleep(0.1)


async def wait_ready(client: httpx.AsyncClient, admin_port: int) -> None:
    """Until this process serves and has its backend."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(httpx.HTTPError):  # it is starting
                answer = await client.get(f"http://127.0.0.1:{admin_port}/admin/v1/backends")
                if answer.json()["backends"][0]["state"] == "ready":
                    return
            await asyncio.sleep(0.1)


@pytest.mark.redis
async def test_two_real_processes_show_one_sum(tmp_path: Path) -> None:
    """`workers: 2`: both pages and the status show all requests, also after one process was killed."""
    require_redis_server()
    port, admin_port = free_port(), free_port()
    with redis_server(tmp_path) as redis:
        async with ProbedBackend() as backend, httpx.AsyncClient(timeout=10) as client:
            config = tmp_path / "homing.yaml"
            config.write_text(
                f"listen: {{port: {port}}}\nadmin: {{port: {admin_port}}}\nworkers: 2\n"
                f"sessions: {{store: redis, redis: {{url: '{redis.url}', budget_ms: 500}}}}\n"
                f"log: {{access: false}}\nbackends: [{{id: one, url: '{backend.base_url}'}}]\n"
            )
            command = [sys.executable, "-m", "gateway.main", "gateway", "--config", str(config)]
            process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
            try:
                await wait_ready(client, admin_port)
                await wait_ready(client, admin_port + 1)
                body = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}
                for _ in range(12):  # a connection each, so that both processes get some
                    async with httpx.AsyncClient(timeout=10) as one:
                        answer = await one.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
                        assert answer.status_code == 200
                await wait_for_total(client, admin_port, 12)
                await wait_for_total(client, admin_port + 1, 12)
                psutil.Process(process.pid).children()[0].kill()
                await wait_ready(client, admin_port)
                await wait_ready(client, admin_port + 1)
                for admin in (admin_port, admin_port + 1):
                    assert await total_requests(client, admin) == 12
                    status = (await client.get(f"http://127.0.0.1:{admin}/admin/v1/status")).json()
                    assert sum(status["affinity"].values()) == 12
            finally:
                process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(process.communicate, timeout=30)
            assert process.returncode == 0
