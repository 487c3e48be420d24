"""`homing up` as a user runs it: real processes, real HTTP, kill -9, Ctrl-C. The model is tiny and random."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fakes.running_fleet import ROOT, START_TIMEOUT_S, RunningFleet, free_ports
from fakes.tiny_checkpoint import write_tiny_checkpoint

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("up")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    started = RunningFleet(model, tmp_path_factory.mktemp("run"))
    yield started
    if started.process.poll() is None:
        started.kill()


async def chat(
    client: httpx.AsyncClient, session: str, messages: list[dict[str, str]], **fields: Any
) -> httpx.Response:
    body = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0, **fields}
    return await client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})


async def play(
    client: httpx.AsyncClient, session: str, num_turns: int, pause: asyncio.Event | None = None
) -> list[tuple[httpx.Response, list[dict[str, str]]]]:
    """A conversation; each answer joins the history. Returns every response with what was asked."""
    messages = [{"role": "system", "content": "You are the clerk of a harbour. " * 8}]
    turns = []
    for number in range(num_turns):
        messages = [*messages, {"role": "user", "content": f"{session}: question number {number}?"}]
        if pause is not None and number == num_turns // 2:
            await pause.wait()
        response = await chat(client, session, messages)
        turns.append((response, messages))
        assert response.status_code == 200, response.text
        answer = response.json()["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": answer}]
    return turns


def cached_tokens(response: httpx.Response) -> int:
    count = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(count, int)
    return count


async def test_turns_come_home_and_find_their_history(fleet: RunningFleet) -> None:
    """Turns 2 to 6 land on the first turn's backend, and their cached tokens grow with the history."""
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=60) as client:
        turns = await play(client, "alice", 6)
        assert len({response.headers["x-homing-backend"] for response, _ in turns}) == 1
        assert [one.headers["x-homing-affinity"] for one, _ in turns] == ["new"] + ["hit"] * 5
        counts = [cached_tokens(response) for response, _ in turns]
        assert counts == sorted(counts)
        assert counts[0] == 0
        assert all(later > earlier for earlier, later in itertools.pairwise(counts))


async def test_a_shared_system_prompt_is_found_by_the_next_session(fleet: RunningFleet) -> None:
    """Another session without history finds the system prompt cached when it lands where it was computed."""
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=60) as client:
        first: dict[str, list[int]] = {}
        for number in range(8):
            (response, _), *_ = await play(client, f"newcomer-{number}", 1)
            first.setdefault(response.headers["x-homing-backend"], []).append(cached_tokens(response))
        assert any(count > 0 for counts in first.values() for count in counts[1:])


async def test_twenty_sessions_at_once_all_come_home_with_the_right_words(
    fleet: RunningFleet, model: Path
) -> None:
    """20 × 4 turns: every later turn at home, no error; and each answer equals one computed without reuse."""
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=120) as client:
        played = await asyncio.gather(*(play(client, f"user-{number}", 4) for number in range(20)))
    for turns in played:
        home = turns[0][0].headers["x-homing-backend"]
        assert [response.headers["x-homing-backend"] for response, _ in turns] == [home] * 4
        assert [one.headers["x-homing-affinity"] for one, _ in turns[1:]] == ["hit"] * 3
    await compare_with_recomputation(model, [turn for turns in played[:5] for turn in turns])


async def compare_with_recomputation(model: Path, turns: list[tuple[httpx.Response, Any]]) -> None:
    """Ask a worker that never reuses anything the same questions."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "engine_adapter.server", "--port", str(port), "--model", str(model)]
    command += [
        "--no-prefix-caching",
        "--dtype",
        "fp32",
        "--served-model-name",
        "tiny",
        "--kv-memory",
        "64MiB",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            await wait_ready(client)
            for response, messages in turns:
                cold = await chat(client, "none", messages)
                assert cached_tokens(cold) == 0
                assert cold.json()["choices"] == response.json()["choices"]
    finally:
        process.kill()
        process.wait()


async def wait_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)


async def test_a_killed_worker_costs_no_client_an_error(fleet: RunningFleet) -> None:
    """kill -9 during load: nobody sees an error; the worker comes back and pulls no session home."""
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=120) as client:
        go_on = asyncio.Event()
        load = [asyncio.ensure_future(play(client, f"victim-{number}", 6, go_on)) for number in range(12)]
        await asyncio.sleep(0.5)  # let turns be under way when the worker dies
        before = fleet.status()["worker-0"]
        os.kill(fleet.worker_pid(0), signal.SIGKILL)
        go_on.set()
        played = await asyncio.gather(*load)
        assert {response.status_code for turns in played for response, _ in turns} == {200}
        await wait_for_restart(fleet, before["epoch"])
        for turns in played:
            response, messages = turns[-1]
            last = response.headers["x-homing-backend"]
            now = await chat(client, turns[0][1][1]["content"].split(":")[0], messages)
            assert now.headers["x-homing-backend"] == last


async def wait_for_restart(fleet: RunningFleet, epoch: int) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            worker = (await asyncio.to_thread(fleet.status))["worker-0"]
            # on trial, if many requests failed as it died: that ends with requests that do not
            if worker["state"] in ("ready", "degraded") and worker["epoch"] > epoch:
                return
            await asyncio.sleep(0.2)


def test_status_shows_the_fleet(fleet: RunningFleet) -> None:
    """`homing status` is a table; --json is the API's answer."""
    command = [sys.executable, "-m", "gateway.main", "status"]
    environ = {**os.environ, "HOMING_ADMIN_URL": f"http://127.0.0.1:{fleet.admin_port}", "COLUMNS": "120"}
    table = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in ("worker-0", "worker-1", "ready", "hit rate", "sessions", "cached", "free"):
        assert word in table
    dumped = subprocess.run([*command, "--json"], env=environ, cwd=ROOT, capture_output=True, check=True)
    status = json.loads(dumped.stdout)
    blocks = status["backends"][0]["kv_blocks"]
    assert blocks["used"] + blocks["cached"] + blocks["pinned"] + blocks["free"] > 0


def test_ctrl_c_stops_everything(fleet: RunningFleet) -> None:
    """Within seconds, with status 0, leaving no process. Runs last: it takes the fleet down."""
    children = psutil.Process(fleet.process.pid).children(recursive=True)
    assert len(children) == 3
    assert fleet.interrupt() < 10
    assert fleet.process.returncode == 0
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_killing_the_supervisor_leaves_no_orphans(model: Path, tmp_path: Path) -> None:
    """kill -9 of `homing up` itself: the kernel ends its children."""
    fleet = RunningFleet(model, tmp_path / "run", num_backends=1)
    children = psutil.Process(fleet.process.pid).children(recursive=True)
    fleet.kill()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["up", "--model", "/no/such/model"], "no model at /no/such/model"),
        (["up", "--backends", "0"], "--backends must be at least 1"),
        (
            ["up", "--port", "0", "--admin-port", "0", "--config", "/no/such.yaml"],
            "cannot read /no/such.yaml",
        ),
        (
            ["up", "--port", "0", "--admin-port", "0", "--policy", "nope"],
            "routing: policy must be one of homing,",
        ),
        (["gateway", "--config", "/no/such.yaml"], "cannot read /no/such.yaml"),
        (["gateway", "--backend", "ftp://x"], "must start with http://"),
    ],
)
def test_mistakes_end_with_one_line_and_status_2(arguments: list[str], expected: str) -> None:
    """No traceback; the line says what to do."""
    command = [sys.executable, "-m", "gateway.main", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["up", "gateway"])
def test_a_port_in_use_is_told(command: str, model: Path, tmp_path: Path) -> None:
    """The line names the port or the option to change."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = [sys.executable, "-m", "gateway.main", command, "--port", str(taken.getsockname()[1])]
        if command == "up":
            arguments += ["--model", str(model), "--run-dir", str(tmp_path)]
        ended = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "port" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_check_prints_the_resolved_configuration(tmp_path: Path) -> None:
    """`homing gateway --check` fills in the defaults and shows no secret."""
    path = tmp_path / "homing.yaml"
    path.write_text("backends: [{id: gpu-1, url: 'http://10.0.0.1:8000', api_key_env: GPU_KEY}]\n")
    command = [sys.executable, "-m", "gateway.main", "gateway", "--config", str(path), "--check"]
    environ = {**os.environ, "GPU_KEY": "s3cr3t", "HOMING_ADMIN_TOKEN": "t0k3n"}
    shown = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout
    assert "gpu-1" in shown
    assert "ttl_s: 3600.0" in shown
    assert "s3cr3t" not in shown
    assert "t0k3n" not in shown
