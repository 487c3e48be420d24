"""Pins a system prompt that many conversations share, so that other traffic cannot evict it.

Start a fleet with `make run`, then run `.venv/bin/python examples/shared_prompt.py`. It pins the prompt on
every worker (as `homing pin` does), then six people ask one question each. None of them waits for the prompt
to be computed, not even the first one on each worker. vLLM and SGLang do not support pins; there the prompt
stays cached only while it is used.
"""

from __future__ import annotations

import argparse
import os
import uuid

import httpx

NUM_PEOPLE = 6
PIN = "harbour-rules"


def main() -> None:
    parser = argparse.ArgumentParser(description="Pin a shared system prompt.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    parser.add_argument("--admin-url", default="http://127.0.0.1:8001", help="the gateway's admin API")
    options = parser.parse_args()

    token = os.environ.get("HOMING_ADMIN_TOKEN")
    admin = httpx.Client(
        base_url=f"{options.admin_url}/admin/v1",
        headers={"authorization": f"Bearer {token}"} if token else {},
        timeout=60,
    )
    client = httpx.Client(base_url=options.url, timeout=60)
    model = client.get("/v1/models").json()["data"][0]["id"]
    rules = f"Harbour {uuid.uuid4()}. " + "Captains sign the book before a rope is tied. " * 12
    system = {"role": "system", "content": rules}

    pinned = admin.post("/pins", json={"name": PIN, "messages": [system]}).raise_for_status()
    for backend in pinned.json()["backends"]:
        pin = next(pin for pin in backend["pins"] if pin["name"] == PIN)
        print(
            f"{backend['backend']}: pin {pin['state']}, {pin['pinned_tokens']} of {pin['num_tokens']} "
            f"tokens held, room for {pin['granted_tokens']}"
        )
    try:
        for number in range(NUM_PEOPLE):
            body = {
                "model": model,
                "messages": [system, {"role": "user", "content": f"Ship {number}: may I come in?"}],
                "max_tokens": 8,
            }
            headers = {"x-session-id": f"ship-{uuid.uuid4()}"}
            answer = client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
            usage = answer.json()["usage"]
            print(
                f"ship {number} at {answer.headers['x-homing-backend']}: "
                f"{usage['prompt_tokens_details']['cached_tokens']} of {usage['prompt_tokens']} tokens cached"
            )
    finally:
        admin.delete(f"/pins/{PIN}")


if __name__ == "__main__":
    main()
