"""Every example runs, in under a minute, against a fleet as `make run` starts it, and shows what it promises.

The model is tiny and random; with it the examples take seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.redis_server import redis_server, require_redis_server
from fakes.running_fleet import ROOT, RunningFleet
from fakes.tiny_checkpoint import write_tiny_checkpoint

EXAMPLES = ROOT / "examples"
pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("examples")]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    started = RunningFleet(model, tmp_path_factory.mktemp("run"))
    yield started
    started.kill()


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run one example as a user does; returns what it printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'cuda'}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(name: str, *arguments: str) -> str:
    return run(sys.executable, str(EXAMPLES / name), *arguments)


def urls(fleet: RunningFleet) -> tuple[str, str, str, str]:
    return ("--url", fleet.base_url, "--admin-url", f"http://127.0.0.1:{fleet.admin_port}")


def test_no_example_is_forgotten() -> None:
    """Whoever adds an example adds its test."""
    tested = Path(__file__).read_text(encoding="utf-8")
    missing = [path.name for path in EXAMPLES.iterdir() if path.is_file() and f'"{path.name}"' not in tested]
    assert missing == []


def test_chat(fleet: RunningFleet) -> None:
    """Turns 2 to 6 come home and find their history."""
    homing, _, scattered = python("chat.py", *urls(fleet)).partition("Round robin")
    assert len(re.findall(r"\bhit\b", homing)) == 5
    assert "worker-0" in scattered
    assert "worker-1" in scattered


def test_chat_with_curl(fleet: RunningFleet) -> None:
    """The second turn is a hit with cached tokens."""
    first, _, second = run("sh", str(EXAMPLES / "chat.sh"), fleet.base_url, "tiny").partition("Turn 2")
    assert "x-homing-affinity: new" in first
    assert "x-homing-affinity: hit" in second
    found = re.search(r'"cached_tokens": ?(\d+)', second)
    assert found is not None
    assert int(found[1]) > 0


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm; the other examples do not")
def test_chat_with_node(fleet: RunningFleet, tmp_path: Path) -> None:
    """The official client for Node, streaming."""
    shutil.copy(EXAMPLES / "chat.mjs", tmp_path)
    run("npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "openai@6", cwd=tmp_path)
    lines = run("node", "chat.mjs", fleet.base_url, cwd=tmp_path).splitlines()
    assert [line.split()[1] for line in lines] == ["new", "hit", "hit"]


def test_chat_with_the_anthropic_client(fleet: RunningFleet) -> None:
    """The session id in Claude Code's header keeps the conversation at home."""
    lines = python("anthropic_chat.py", "--url", fleet.base_url).splitlines()
    assert [line.split()[1] for line in lines] == ["new", "hit", "hit"]


def test_agent_with_sub_agents(fleet: RunningFleet) -> None:
    """Each agent has a home of its own and finds its history there."""
    lines = [line.split() for line in python("agent.py", "--url", fleet.base_url).splitlines()]
    assert len(lines) == 9
    homes: dict[str, set[str]] = {}
    for agent, _, number, backend, affinity, *_ in lines:
        homes.setdefault(agent, set()).add(backend)
        assert affinity == ("new" if number == "1" else "hit")
    assert all(len(backends) == 1 for backends in homes.values())


def test_drain(fleet: RunningFleet) -> None:
    """A drain moves each session once; nobody flaps back."""
    shown = python("drain.py", *urls(fleet))
    _, during, after = re.split(r"Next turns, .*\n", shown)
    assert "moved home_draining" in during
    assert "hit home" in after
    assert "moved" not in after


@pytest.mark.redis
def test_two_gateways(fleet: RunningFleet, tmp_path: Path) -> None:
    """Turns that alternate between two gateways are all at home."""
    require_redis_server()
    with redis_server(tmp_path) as redis:
        lines = python(
            "two_gateways.py",
            *("--redis-url", redis.url, "--admin-url", f"http://127.0.0.1:{fleet.admin_port}"),
        ).splitlines()
    assert [re.sub(r".*: \S+ (\w+),.*", r"\1", line) for line in lines] == ["new"] + ["hit"] * 5


def test_a_shared_prompt_is_pinned(fleet: RunningFleet) -> None:
    """Once a worker has it, every conversation there finds the pinned prompt."""
    lines = python("shared_prompt.py", *urls(fleet)).splitlines()
    ships = [re.search(r"at (\S+): (\d+) of", line) for line in lines if line.startswith("ship")]
    assert len(ships) == 6
    assert sum("held" in line for line in lines) == 2
    cached = [int(found[2]) for found in ships if found is not None]
    assert all(cached), lines


def test_two_tenants(fleet: RunningFleet) -> None:
    """The same session id is another session, the limit is one tenant's own, a stranger stays out."""
    admin = ("--admin-url", f"http://127.0.0.1:{fleet.admin_port}")
    shown = [
        re.sub(r" at .*, (\d+) tokens", r" \1", line).split()
        for line in python("two_tenants.py", *admin).splitlines()
    ]
    assert [line[:3] for line in shown] == [
        ["red", "200", "new"],
        ["red", "200", "hit"],
        ["blue", "200", "new"],
        ["blue", "200", "hit"],
        ["blue", "200", "hit"],
        ["blue", "429", "rate_limit_exceeded,"],
        ["red", "200", "hit"],
        ["stranger", "401", "invalid_api_key,"],
    ]
    assert shown[2][3] == "0"
