"""Two gateways with one Redis: every turn goes to the session's home, through either gateway.

Start a fleet with `make run` and a Redis, then run

    .venv/bin/python examples/two_gateways.py --redis-url redis://127.0.0.1:6379/0

It starts two more gateways in front of the same workers, sends the turns of one chat to them in rotation, and
stops them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import httpx

NUM_TURNS = 6
START_TIMEOUT_S = 30.0


def start_gateway(
    folder: Path, number: int, backends: list[dict[str, str]], redis_url: str
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start one gateway and return its address when it is ready."""
    port = 8100 + number
    config = {
        "listen": {"port": port},
        "admin": {"is_enabled": False},
        "backends": backends,
        "sessions": {"store": "redis", "redis": {"url": redis_url}},
    }
    path = folder / f"gateway-{number}.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    environment = {**os.environ, "HOMING_KEY_SECRET": "the-same-on-all-gateways"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.main", "gateway", "--config", str(path), "--die-with-parent"],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(f"{url}/readyz?min_backends=1").status_code == 200:
                return url, process
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"gateway {number} did not become ready: is port {port} free, and Redis at {redis_url}?")


def main() -> None:
    parser = argparse.ArgumentParser(description="Two gateways that share one session table.")
    parser.add_argument("--redis-url", default="redis://127.0.0.1:6379/0")
    parser.add_argument(
        "--admin-url",
        default="http://127.0.0.1:8001",
        help="admin API of the running fleet, to find its workers",
    )
    options = parser.parse_args()

    known = httpx.get(f"{options.admin_url}/admin/v1/backends").json()["backends"]
    backends = [
        {"id": backend["id"], "url": backend["url"], "engine": backend["engine"]} for backend in known
    ]
    with tempfile.TemporaryDirectory() as folder:
        gateways = [start_gateway(Path(folder), number, backends, options.redis_url) for number in range(2)]
        try:
            play([url for url, _ in gateways])
        finally:
            for _, process in gateways:
                process.terminate()
            for _, process in gateways:
                process.wait()


def play(urls: list[str]) -> None:
    """Run one chat and send its turns to the gateways in rotation."""
    model = httpx.get(f"{urls[0]}/v1/models").json()["data"][0]["id"]
    headers = {"x-session-id": f"shared-{uuid.uuid4()}"}
    messages = [{"role": "system", "content": "You are the clerk of a harbour. " * 12}]
    for number in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"Question {number + 1}: may I come in?"})
        body = {"model": model, "messages": messages, "max_tokens": 8}
        answer = httpx.post(f"{urls[number % 2]}/v1/chat/completions", json=body, headers=headers, timeout=60)
        answer.raise_for_status()
        messages.append(answer.json()["choices"][0]["message"])
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        print(
            f"turn {number + 1} by gateway {number % 2 + 1}: {answer.headers['x-homing-backend']} "
            f"{answer.headers['x-homing-affinity']}, {cached} tokens cached"
        )


if __name__ == "__main__":
    main()
