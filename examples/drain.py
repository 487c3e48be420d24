"""Drains a backend during chats: no request fails, and each session moves once.

Start a fleet with `make run`, then run `.venv/bin/python examples/drain.py`. It starts six chats and drains
the backend with most of them. At their next turn these chats move, and the answer says why. Then it undrains
the backend.
"""

from __future__ import annotations

import argparse
import os
import uuid
from collections import Counter

import httpx

NUM_SESSIONS = 6
SYSTEM_PROMPT = "You are the clerk of a harbour. Captains sign the book before a rope is tied. " * 4


class Chat:
    """One conversation."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client, self._model = client, model
        self._headers = {"x-session-id": f"drain-{uuid.uuid4()}"}
        self._messages = [{"role": "system", "content": SYSTEM_PROMPT}]

    def say(self, text: str) -> tuple[str, str, str]:
        """Send one turn and return backend, affinity and reason."""
        self._messages.append({"role": "user", "content": text})
        body = {"model": self._model, "messages": self._messages, "max_tokens": 8}
        answer = self._client.post("/v1/chat/completions", json=body, headers=self._headers)
        answer.raise_for_status()
        self._messages.append(answer.json()["choices"][0]["message"])
        names = ("x-homing-backend", "x-homing-affinity", "x-homing-reason")
        backend, affinity, reason = (answer.headers[name] for name in names)
        return backend, affinity, reason


def show(title: str, turns: list[tuple[str, str, str]]) -> None:
    print(title)
    for turn, count in sorted(Counter(turns).items()):
        print(f"  {count} x {' '.join(turn)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Drain a backend during chats.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    parser.add_argument("--admin-url", default="http://127.0.0.1:8001", help="the gateway's admin API")
    options = parser.parse_args()

    token = os.environ.get("HOMING_ADMIN_TOKEN")
    admin = httpx.Client(
        base_url=f"{options.admin_url}/admin/v1",
        headers={"authorization": f"Bearer {token}"} if token else {},
    )
    client = httpx.Client(base_url=options.url, timeout=60)
    model = client.get("/v1/models").json()["data"][0]["id"]

    chats = [Chat(client, model) for _ in range(NUM_SESSIONS)]
    first = [chat.say("May I come in?") for chat in chats]
    show("First turns", first)
    victim = Counter(backend for backend, _, _ in first).most_common(1)[0][0]
    admin.post(f"/backends/{victim}/drain", json={}).raise_for_status()
    show(f"Next turns, while {victim} is drained", [chat.say("Where do I sign?") for chat in chats])
    admin.post(f"/backends/{victim}/undrain", json={}).raise_for_status()
    show(f"Next turns, with {victim} back: no session moves", [chat.say("Thank you.") for chat in chats])


if __name__ == "__main__":
    main()
