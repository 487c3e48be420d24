"""A six-turn chat through Homing, then the same chat by round robin.

Start a fleet with `make run`, then run `.venv/bin/python examples/chat.py`. It uses the unchanged OpenAI
client and sends a session id in a header. (Without one, Homing recognises the conversation by its beginning.)
For comparison, it then sends the turns directly to the workers in rotation, without the gateway.
"""

from __future__ import annotations

import argparse
import time
import uuid
from dataclasses import dataclass

import httpx
import openai

SYSTEM_PROMPT = (
    "You are the support assistant of a shop that sells network routers. Answer briefly and kindly. "
    + " ".join(
        f"Rule {number}: when a customer asks about section {number} of the handbook, quote it word "
        "for word, never invent part numbers, and offer a return within thirty days."
        for number in range(1, 13)
    )
)
QUESTIONS = (
    "My router keeps restarting every few hours. What should I check first?",
    "It is a model R7, and the power light blinks orange.",
    "I replaced the power supply last week already.",
    "Could it be overheating? The room is warm.",
    "How do I update its firmware without the web page?",
    "Thanks. Please list the steps once more.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The result of one turn."""

    backend: str
    affinity: str
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    answer: str


def ask(client: openai.OpenAI, model: str, messages: list[dict[str, str]], headers: dict[str, str]) -> Turn:
    """Send one streamed request and time its first token."""
    started = time.perf_counter()
    ttft_ms = 0.0
    words: list[str] = []
    with client.chat.completions.with_streaming_response.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]  # plain dicts are what the API takes
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers=headers,
    ) as response:
        usage = None
        for chunk in response.parse():
            if chunk.choices and chunk.choices[0].delta.content:
                ttft_ms = ttft_ms or (time.perf_counter() - started) * 1000
                words.append(chunk.choices[0].delta.content)
            usage = chunk.usage or usage
        assert usage is not None
        details = usage.prompt_tokens_details
        return Turn(
            backend=response.headers.get("x-homing-backend", "–"),
            affinity=response.headers.get("x-homing-affinity", "–"),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            ttft_ms=ttft_ms,
            answer="".join(words),
        )


def play(
    title: str, clients: list[tuple[str, openai.OpenAI]], model: str, salt: str, headers: dict[str, str]
) -> float:
    """Run the chat over the clients in rotation. Return the mean TTFT of turns 2 to 6."""
    print(f"\n{title}")
    print(f"{'turn':>4}  {'backend':<10} {'affinity':<9} {'prompt':>7} {'cached':>7} {'TTFT':>9}   answer")
    messages = [{"role": "system", "content": f"{salt} {SYSTEM_PROMPT}"}]
    ttfts: list[float] = []
    for number, question in enumerate(QUESTIONS, 1):
        name, client = clients[(number - 1) % len(clients)]
        messages.append({"role": "user", "content": question})
        turn = ask(client, model, messages, headers)
        messages.append({"role": "assistant", "content": turn.answer})
        backend = turn.backend if turn.backend != "–" else name
        print(
            f"{number:>4}  {backend:<10} {turn.affinity:<9} {turn.prompt_tokens:>7} {turn.cached_tokens:>7} "
            f"{turn.ttft_ms:>6.0f} ms   {' '.join(turn.answer.split())[:48]}"
        )
        ttfts.append(turn.ttft_ms)
    return sum(ttfts[1:]) / len(ttfts[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    parser.add_argument(
        "--admin-url", default="http://127.0.0.1:8001", help="the gateway's admin API, to find the workers"
    )
    options = parser.parse_args()

    gateway = openai.OpenAI(base_url=f"{options.url}/v1", api_key="none")
    model = gateway.models.list().data[0].id
    backends = httpx.get(f"{options.admin_url}/admin/v1/backends").json()["backends"]
    workers = [
        (backend["id"], openai.OpenAI(base_url=f"{backend['url']}/v1", api_key="none"))
        for backend in backends
        if backend["state"] == "ready"
    ]
    # each run has its own system prompt, so that neither finds the other's history in a cache
    run = uuid.uuid4().hex[:8]
    homing = play("Through Homing", [("", gateway)], model, f"Case A-{run}.", {"x-session-id": f"chat-{run}"})
    scattered = play("Round robin over the same workers", workers, model, f"Case B-{run}.", {})
    print(
        f"\nMean time to first token, turns 2 to 6: {homing:.0f} ms through Homing, {scattered:.0f} ms by "
        f"round robin ({scattered / homing:.1f} times as long)."
    )


if __name__ == "__main__":
    main()
