"""Two tenants on one fleet: separate keys and sessions, and a limit that only one of them reaches.

Start a fleet with `make run`, then run `.venv/bin/python examples/two_tenants.py`. It starts another gateway
with `tenants` in front of the same workers, and stops it at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

PORT = 8110
START_TIMEOUT_S = 30.0
KEYS = {"red": "red-key-0123456789abcdef", "blue": "blue-key-0123456789abcdef"}


def start_gateway(folder: Path, backends: list[dict[str, str]]) -> subprocess.Popen[bytes]:
    """Start a gateway with two tenants and return it when it is ready."""
    config = {
        "listen": {"port": PORT},
        "admin": {"is_enabled": False},
        "backends": backends,
        "tenants": [
            {"name": "red", "keys_env": "RED_KEYS"},
            {"name": "blue", "keys_env": "BLUE_KEYS", "limits": {"requests_per_minute": 3}},
        ],
        "authentication": {"cache_salt": True},
    }
    path = folder / "tenants.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.main", "gateway", "--config", str(path), "--die-with-parent"],
        env={**os.environ, "RED_KEYS": KEYS["red"], "BLUE_KEYS": KEYS["blue"]},
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{PORT}/readyz?min_backends=1").status_code == 200:
                return process
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"the gateway did not become ready: is port {PORT} free?")


def ask(key: str, model: str) -> httpx.Response:
    """Send the same session id and the same text for every key."""
    return httpx.post(
        f"http://127.0.0.1:{PORT}/v1/chat/completions",
        headers={"authorization": f"Bearer {key}", "x-session-id": "the-same-id"},
        json={
            "model": model,
            "messages": [
                {"role": "system", "content": "You are the clerk of a harbour. " * 12},
                {"role": "user", "content": "May I come in?"},
            ],
            "max_tokens": 8,
        },
        timeout=60,
    )


def show(name: str, answer: httpx.Response) -> None:
    if answer.status_code != 200:
        wait = answer.headers.get("retry-after", "-")
        print(f"{name:<9} {answer.status_code} {answer.json()['error']['code']}, retry after {wait} s")
        return
    details = answer.json()["usage"]["prompt_tokens_details"]
    print(
        f"{name:<9} 200 {answer.headers['x-homing-affinity']} at {answer.headers['x-homing-backend']}, "
        f"{details['cached_tokens']} tokens cached"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Two tenants with separate sessions.")
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
        process = start_gateway(Path(folder), backends)
        try:
            headers = {"authorization": f"Bearer {KEYS['red']}"}
            models = httpx.get(f"http://127.0.0.1:{PORT}/v1/models", headers=headers).json()["data"]
            model = models[0]["id"]
            show("red", ask(KEYS["red"], model))
            show("red", ask(KEYS["red"], model))  # a hit: its own session
            show("blue", ask(KEYS["blue"], model))  # new, nothing cached: blue does not share with red
            for _ in range(3):
                show("blue", ask(KEYS["blue"], model))  # the fourth request in a minute exceeds the limit
            show("red", ask(KEYS["red"], model))  # red is not affected
            show("stranger", ask("no-such-key-0123456789", model))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
