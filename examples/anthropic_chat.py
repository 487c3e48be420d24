"""A chat of three turns through `/v1/messages` with the Anthropic SDK.

Start a fleet with `make run`, then run `.venv/bin/python examples/anthropic_chat.py`. It sends the session id
in a header, as Claude Code does; `metadata.user_id` would also work.
"""

from __future__ import annotations

import argparse
import uuid

import anthropic
import httpx
from anthropic.types import MessageParam

SYSTEM_PROMPT = "You are the clerk of a harbour. Captains sign the book before a rope is tied. " * 6
QUESTIONS = ("May I come in?", "Where do I sign?", "Thank you. Anything else?")


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat through the Messages API.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    url = parser.parse_args().url

    model = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
    client = anthropic.Anthropic(base_url=url, api_key="unused")
    headers = {"x-claude-code-session-id": f"session-{uuid.uuid4()}"}
    messages: list[MessageParam] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        raw = client.messages.with_raw_response.create(
            model=model, max_tokens=16, system=SYSTEM_PROMPT, messages=messages, extra_headers=headers
        )
        answer = raw.parse()
        text = "".join(block.text for block in answer.content if block.type == "text")
        messages.append({"role": "assistant", "content": text})
        usage = answer.usage
        print(
            f"{raw.headers['x-homing-backend']:<10} {raw.headers['x-homing-affinity']:<6} "
            f"new {usage.input_tokens:>4}  cached {usage.cache_read_input_tokens or 0:>4}  {text!r}"
        )


if __name__ == "__main__":
    main()
