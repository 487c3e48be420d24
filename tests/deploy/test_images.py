"""The images' files: linted, and their entry points, default commands and health checks really run.

Nothing is built here: the same commands run outside a container, on this machine's Python, with only
addresses and file places replaced.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from fakes.dockerfile import Dockerfile, read_dockerfile
from fakes.redis_server import free_port
from fakes.tiny_checkpoint import write_tiny_checkpoint

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 90.0


@pytest.fixture(params=["gateway", "worker"])
def dockerfile(request: pytest.FixtureRequest) -> Dockerfile:
    return read_dockerfile(request.param)


def test_hadolint_finds_nothing(dockerfile: Dockerfile) -> None:
    """The real linter, with its default rules."""
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, dockerfile.path], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_final_image_is_small_and_unprivileged(dockerfile: Dockerfile) -> None:
    """Two stages on a pinned slim base, a numeric user, nothing installed after the build, labels."""
    text = dockerfile.path.read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+$", text, re.MULTILINE)
    assert dockerfile.bases == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"]
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", dockerfile.value("USER"))
    assert not any("pip" in value or "apt" in value for key, value in dockerfile.instructions if key == "RUN")
    assert "org.opencontainers.image.licenses" in dockerfile.value("LABEL")


def test_the_build_sees_what_it_copies_and_little_else(dockerfile: Dockerfile) -> None:
    """Every COPY source exists and is let through by the ignore file, which starts by refusing all."""
    ignored = dockerfile.path.with_suffix(".Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert ignored[1] == "*"
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.path.read_text(), re.MULTILINE)
    for source in " ".join(sources).split():
        assert (ROOT / source).exists()
        assert source in allowed


# -- run what is written


@contextmanager
def running(command: list[str], folder: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the image, in an empty place, without a home; killed if it has not ended."""
    folder.mkdir()
    log = (folder.parent / "log").open("wb")
    minimal = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{folder.parent}:{ROOT}:{ROOT}/cuda",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/nonexistent",
        **environ,
    }
    process = subprocess.Popen(command, cwd=folder, env=minimal, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        log.close()


def outside(command: list[str], **replaced: str) -> list[str]:
    """The same command, with this environment's `homing` and other places and ports."""
    for written, actual in replaced.items():
        pattern = {"config": "/etc/homing/homing.yaml", "port": ":8000/"}[written]
        assert any(pattern in word for word in command)
        command = [word.replace(pattern, actual) for word in command]
    assert command[0] == "homing"
    return [sys.executable, "-m", "gateway.main", *command[1:]]


def wait_healthy(process: subprocess.Popen[bytes], health: list[str], log: Path) -> None:
    """Run the health check until it passes."""
    deadline_s = time.monotonic() + START_LIMIT_S
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    while subprocess.run(health, env=environ, capture_output=True, timeout=30).returncode:
        if process.poll() is not None or time.monotonic() > deadline_s:
            pytest.fail(log.read_text())
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes], number: int) -> int:
    process.send_signal(number)
    return process.wait(timeout=30)


def test_the_gateway_image_runs_as_written(tmp_path: Path) -> None:
    """Default command, health check and stop signal; torch and numpy cannot be imported; writes nothing."""
    image = read_dockerfile("gateway")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\n"
    )
    port = free_port()
    config = yaml.safe_load((ROOT / "deploy" / "docker" / "homing.yaml").read_text())
    assert config["listen"] == {"host": "0.0.0.0", "port": 8000}
    config |= {"listen": {"host": "127.0.0.1", "port": port}, "admin": {"port": 0}}
    (tmp_path / "homing.yaml").write_text(yaml.safe_dump(config))
    command = outside(
        image.command("ENTRYPOINT") + image.command("CMD"), config=str(tmp_path / "homing.yaml")
    )
    health = outside(image.command("HEALTHCHECK"), port=f":{port}/")
    with running(command, tmp_path / "cwd") as process:
        wait_healthy(process, health, tmp_path / "log")
        assert end(process, signal.Signals[image.value("STOPSIGNAL")]) == 0
    assert list((tmp_path / "cwd").iterdir()) == []
    assert subprocess.run(health, capture_output=True, timeout=30).returncode == 1


def test_the_worker_image_runs_as_written(tmp_path: Path) -> None:
    """Options behind the entry point's own win; healthy once the model is loaded; ends in order."""
    image = read_dockerfile("worker")
    port = free_port()
    model = write_tiny_checkpoint(tmp_path / "model")
    options = ["--host", "127.0.0.1", "--port", str(port), "--model", str(model), "--num-kv-blocks", "64"]
    command = outside(image.command("ENTRYPOINT") + image.command("CMD")) + options
    health = outside(image.command("HEALTHCHECK"), port=f":{port}/")
    with running(command, tmp_path / "cwd", HOMING_CACHE=str(tmp_path / "cache")) as process:
        wait_healthy(process, health, tmp_path / "log")
        assert end(process, signal.Signals[image.value("STOPSIGNAL")]) == 0
    assert list((tmp_path / "cwd").iterdir()) == []
