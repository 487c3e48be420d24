"""A worker process that is killed and restarted still has its conversations."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from engine.worker_app import LIMIT_S
from fakes.tiny_checkpoint import write_tiny_checkpoint

BODY = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "You are a patient assistant. " * 20},
        {"role": "user", "content": "hi"},
    ],
    "max_tokens": 4,
    "temperature": 0,
}


@contextmanager
def running(checkpoint: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a worker with a disk tier; yield it and its address when it is ready."""
    command = [
        *(sys.executable, "-m", "engine_adapter.server", "--port", "0", "--model", str(checkpoint)),
        *("--served-model-name", "tiny", "--dtype", "fp32", "--num-kv-blocks", "512", "--block-size", "4"),
        *("--kv-disk-path", str(folder), "--kv-disk-bytes", "8MiB", "--die-with-parent"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("worker ready"), line
            yield process, line.split(" on ")[1].split()[0]
        finally:
            process.kill()


def asked(url: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url + path, data=data, headers={"Content-Type": "application/json"})
    with urlopen(request, timeout=LIMIT_S) as response:
        return json.load(response)


@pytest.mark.timeout(300)  # two starts of a process that imports torch
def test_a_killed_worker_comes_back_warm(tmp_path: Path) -> None:
    """Killed after its first turn was written, the next life reuses every complete block of it."""
    checkpoint = write_tiny_checkpoint(tmp_path / "model")
    with running(checkpoint, tmp_path / "kv") as (process, url):
        first = asked(url, "/v1/chat/completions", BODY)
        num_complete = (first["usage"]["prompt_tokens"] - 1) // 4
        deadline_s = time.monotonic() + LIMIT_S
        while asked(url, "/v1/kv/stats")["tiers"]["disk"]["num_stored_blocks"] < num_complete:
            assert time.monotonic() < deadline_s
        process.send_signal(signal.SIGKILL)
        assert process.wait(LIMIT_S) == -signal.SIGKILL
    with running(checkpoint, tmp_path / "kv") as (_, url):
        again = asked(url, "/v1/chat/completions", BODY)
    assert again["choices"] == first["choices"]
    assert again["homing"]["cached_tokens_by_tier"]["disk"] == num_complete * 4
