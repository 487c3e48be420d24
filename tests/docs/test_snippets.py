"""Every command and snippet in the documentation is run here, or named below with the reason why not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from docs.markdown_blocks import ROOT, Block, blocks
from fakes.running_fleet import RunningFleet
from fakes.tiny_checkpoint import write_tiny_checkpoint

from gateway.config.config import parse_config

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("snippets")]

# What may be run here: nothing that changes the machine.
RUN = ("curl ", "homing ", ".venv/bin/", "export ", "HOMING_")
# A command that begins like this is not run, because:
NOT_RUN = {
    "make ": "what CI itself runs, or a benchmark of many minutes",
    "docker ": "needs a container engine; tests/deploy validates these files with Compose and Hadolint",
    "cd deploy/compose": "belongs to the docker commands behind it",
    "cp .env.example": "belongs to the docker commands behind it",
    "python3 -m venv /opt/homing": "changes the machine; tests/packaging installs the wheel",
    "install -D": "changes the machine",
    "cp deploy/systemd": "changes the machine",
    "systemctl ": "needs systemd as the first process; tests/deploy verifies the units",
    "helm ": "needs a cluster; tests/deploy renders the chart with Helm",
    "BIND=": "tests/deploy starts HAProxy with this file",
    "homing up ": "tests/cli/test_up.py starts it, and so does the fleet used here",
    "homing gateway --config homing.yaml": "serves until it is stopped; tests/cli starts it",
    "homing simulate --trace": "needs the reader's trace; tests/replay reads traces",
    "homing simulate --scenario chat --backends 8 --policy all": "minutes; `make bench-routing` runs more",
    "for name in gpu-1 gpu-2": "restarts engines; a test below runs it with another restart and pause",
    "OPENAI_API_BASE_URL=": "environment of another program",
    "ENABLE_FORWARD_USER_INFO_HEADERS=": "environment of another program",
}


FOLDERS = ("docs", "deploy", "tests", "gateway", "engine_adapter", "cuda", "examples")


def reason_not_to_run(command: str) -> str | None:
    if "--check" in command:
        return None
    return next((reason for beginning, reason in NOT_RUN.items() if command.startswith(beginning)), None)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    started = RunningFleet(model, tmp_path_factory.mktemp("run"))
    yield started
    started.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader stands: with the README's configuration saved, and the examples at hand."""
    place = tmp_path_factory.mktemp("reader")
    (place / "examples").symlink_to(ROOT / "examples")
    for block in blocks("yaml"):
        first = re.match(r"# (\S+\.yaml)\n", block.text)
        if block.page == "README.md" and first is not None:
            (place / first[1]).write_text(block.text, encoding="utf-8")
    return place


def here(text: str, fleet: RunningFleet) -> str:
    """The same text for this fleet: its ports, its model, its backends' names, this interpreter."""
    replaced = {
        "127.0.0.1:8000": f"127.0.0.1:{fleet.port}",
        "127.0.0.1:8001": f"127.0.0.1:{fleet.admin_port}",
        "smollm2-135m-instruct": "tiny",
        "gpu-1": "worker-0",
        "gpu-2": "worker-1",
        "SESSION_ID": "alice",
        "--deadline-s 900": "--deadline-s 2",  # nobody comes back to the sessions of these tests
    }
    for written, actual in replaced.items():
        text = text.replace(written, actual)
    text = text.replace(".venv/bin/python", sys.executable)
    text = re.sub(r"(?:\.venv/bin/)?\bhoming (?=[a-z])", f"{sys.executable} -m gateway.main ", text)
    if "examples/" in text:
        text += f" --url http://127.0.0.1:{fleet.port} --admin-url http://127.0.0.1:{fleet.admin_port}"
    return text


def typed(text: str, fleet: RunningFleet, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a shell in `folder` does with this text."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'cuda'}",
            "HOMING_ADMIN_URL": f"http://127.0.0.1:{fleet.admin_port}",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def ask_as_alice(fleet: RunningFleet) -> None:
    """One turn of the session that the pages speak of, so that each block works without those before it."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is a llama?"}], "max_tokens": 4}
    answer = httpx.post(
        f"{fleet.base_url}/v1/chat/completions", json=body, headers={"x-session-id": "alice"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-homing-key-source"] == "header", answer.headers


SHELL_BLOCKS = blocks("sh", "bash", "console")


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=str)
def test_commands_work(block: Block, fleet: RunningFleet, folder: Path) -> None:
    """Typed as they stand they succeed, on a fleet as `make run` leaves it."""
    ask_as_alice(fleet)
    for command in block.commands:
        if reason_not_to_run(command) is not None:
            continue
        assert command.startswith(RUN), f"neither run nor excused: {command}"
        done = typed(here(command, fleet), fleet, folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if command.startswith("curl"):
            assert '"error"' not in done.stdout, done.stdout


def test_no_reason_is_left_over() -> None:
    """Each reason not to run a command is still needed by some command."""
    commands = [command for block in SHELL_BLOCKS for command in block.commands]
    assert [one for one in NOT_RUN if not any(command.startswith(one) for command in commands)] == []


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_is_valid(block: Block) -> None:
    """It parses, and what configures Homing is accepted by it."""
    data = yaml.safe_load(block.text)
    known = set(
        yaml.safe_load("[listen, backends, sessions, limits, routing, fleet, keys, tenants, tracing]")
    )
    if isinstance(data, dict) and known & set(data):
        parse_config(data)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_is_valid(block: Block) -> None:
    """It parses."""
    json.loads(block.text)


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_toml_is_valid(block: Block) -> None:
    """It parses."""
    tomllib.loads(block.text)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_works(block: Block, fleet: RunningFleet, folder: Path) -> None:
    """Pasted into a file it runs against the fleet."""
    done = subprocess.run(
        [sys.executable, "-c", here(block.text, fleet)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_backends_can_be_restarted_one_by_one(fleet: RunningFleet) -> None:
    """The loop of the operations page, with a worker killed and started again in place of `ssh`."""
    (loop,) = [one for block in SHELL_BLOCKS for one in block.commands if one.startswith("for name in")]
    written = here(loop, fleet).replace("ssh $name sudo systemctl restart vllm", "kill ${pid[$name]}")
    assert "kill" in written
    pids = " ".join(f"[worker-{number}]={fleet.worker_pid(number)}" for number in range(2))
    before = {name: one["epoch"] for name, one in fleet.status().items()}
    done = typed(f"declare -A pid=({pids}); {written.replace('sleep 300', 'true')}", fleet, ROOT)
    assert done.returncode == 0, done.stderr
    after = fleet.status()
    assert {name: one["state"] for name, one in after.items()} == dict.fromkeys(before, "ready")
    assert all(after[name]["epoch"] > epoch for name, epoch in before.items())


def test_links_lead_somewhere() -> None:
    """Files that the pages name are there."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        links = [page.parent / target for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text)]
        named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text)
        missing = [str(path) for path in [*links, *(ROOT / name for name in named)] if not path.exists()]
        assert missing == [], page.name
