"""Cost of the wire layer's hot functions, in CPU µs per call: `pytest -m bench tests/bench/bench_wire.py -s`.

Prints numbers and asserts none. Thread CPU time, best of many short rounds, because the machines this runs
on are shared; sizes are whole JSON bodies with a quarter of system prompt, the rest in turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from gateway.errors import NoBackend
from gateway.values import Api, Message, RequestFacts
from gateway.wire.error_bodies import error_response
from gateway.wire.facts import FactsParser
from gateway.wire.headers import RequestHeads, response_headers
from gateway.wire.routes import RouteTable
from gateway.wire.settings import HeaderSettings, KeySettings
from gateway.wire.sse import SseObserver

pytestmark = pytest.mark.bench

HEADERS = [
    (b"Host", b"gateway:8000"),
    (b"Accept", b"application/json"),
    (b"Content-Type", b"application/json"),
    (b"User-Agent", b"OpenAI/Python 2.8.0"),
    (b"X-Stainless-Lang", b"python"),
    (b"X-Stainless-Async", b"false"),
    (b"x-stainless-retry-count", b"0"),
    (b"Authorization", b"Bearer sk-0123456789"),
    (b"Content-Length", b"1024"),
    (b"X-Session-Id", b"54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe"),
]
SIZES = {"1 KB": 1 << 10, "16 KB": 1 << 14, "128 KB": 1 << 17}


def measure(call: Callable[[], object], rounds: int = 200, calls: int = 20) -> float:
    """Return the best round's CPU time per call in µs."""
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time_ns()
        for _ in range(calls):
            call()
        best = min(best, (time.thread_time_ns() - start) / calls / 1000)
    return best


def chat_body(size: int, stream: bool = True) -> bytes:
    """A conversation of `size` bytes: one quarter system prompt, turns of at most 2,000 bytes."""
    words = "the model keeps what it has read, so a turn goes home. "
    turn = max(100, min(2_000, size // 6))
    messages = [{"role": "system", "content": (words * (size // 40))[: size // 4]}]
    while True:
        role = "user" if len(messages) % 2 else "assistant"
        messages.append({"role": role, "content": (words * 50)[:turn]})
        body = {"model": "mock-model", "stream": stream, "max_tokens": 64, "messages": messages}
        encoded = json.dumps(body, separators=(",", ":")).encode()
        if len(encoded) > size - turn - 40:
            return encoded


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "headers"), [("session header", HEADERS), ("fingerprint", HEADERS[:-1])])
def test_parse(size: str, name: str, headers: list[tuple[bytes, bytes]]) -> None:
    """One request to facts, system prompt known."""
    parser = FactsParser(KeySettings(), b"secret")
    body = chat_body(SIZES[size])
    num_messages = len(json.loads(body)["messages"])
    spent = measure(lambda: parser.parse(Api.CHAT, headers, body))
    decode = measure(lambda: parser._decoder.decode(Api.CHAT, body))
    print(f"\nparse {size:>6} by {name:<14} {spent:7.1f} µs, decode {decode:6.1f}, {num_messages} messages")


@pytest.mark.parametrize("size", SIZES)
def test_parse_new_system_prompt(size: str) -> None:
    """The same with a system prompt never seen before: normalisers and hashes run."""
    parser = FactsParser(KeySettings(prompt_memo_entries=1), b"secret")
    bodies = [chat_body(SIZES[size]).replace(b"the model", b"%b model" % word) for word in (b"the", b"one")]
    turns = iter(range(1 << 30))
    spent = measure(lambda: parser.parse(Api.CHAT, HEADERS, bodies[next(turns) % 2]), rounds=50, calls=4)
    print(f"\nparse {size:>6} with a new system prompt {spent:7.1f} µs")


def growing_bodies(size: int, num_sessions: int, **fields: str) -> list[list[bytes]]:
    """Eight turns of each session, turn by turn; each adds `size` / 12 bytes."""
    words = "the model keeps what it has read, so a turn goes home. "
    opening = json.loads(chat_body(size // 3))["messages"]
    talks = [
        [*opening, {"role": "user", "content": f"{session}: {words}"}] for session in range(num_sessions)
    ]
    turns = []
    for turn in range(8):
        for talk in talks:
            text = (f"{turn}: " + words * (size // 24 // len(words) + 1))[: size // 24]
            talk += [{"role": role, "content": text} for role in ("assistant", "user") if turn]
        bodies = [
            {"model": "mock-model", "user": f"{session}", "messages": talk} | fields
            for session, talk in enumerate(talks)
        ]
        turns.append([json.dumps(body, separators=(",", ":")).encode() for body in bodies])
    return turns  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["session header", "body field", "fingerprint"])
def test_parse_growing(size: str, name: str) -> None:
    """Conversations that grow, 32 interleaved: first turn, later turns, and the last one sent again."""
    is_header = name == "session header"
    headers = [
        [
            *HEADERS[:-1],
            *([(b"X-Session-Id", b"54c1eb09-bc4c-4d2f-98eb-%012d" % number)] if is_header else []),
        ]
        for number in range(32)
    ]
    turns = growing_bodies(SIZES[size], 32, **({"session_id": "s"} if name == "body field" else {}))
    best = [float("inf")] * 9
    for _ in range(10):
        parser = FactsParser(KeySettings(), b"secret")
        for turn, bodies in enumerate([*turns, turns[-1]]):
            start = time.thread_time_ns()
            for raw_headers, body in zip(headers, bodies, strict=True):
                parser.parse(Api.CHAT, raw_headers, body)
            best[turn] = min(best[turn], (time.thread_time_ns() - start) / len(bodies) / 1000)
    later = sum(best[1:8]) / 7
    print(
        f"\nparse {size:>6} by {name:<14} first {best[0]:6.1f} µs, growing {later:6.1f}, again {best[8]:6.1f}"
    )


def test_pieces() -> None:
    """Heads, routes, errors and the values that every request makes."""
    heads, routes = RequestHeads(HeaderSettings()), RouteTable()
    answer = [(b"content-type", b"application/json"), (b"date", b"x"), (b"server", b"uvicorn")]
    calls: dict[str, Callable[[], object]] = {
        "request head": lambda: heads.build(
            "POST", "/v1/chat/completions", HEADERS, host="b:1", body_length=1024, request_id="r" * 32
        ),
        "response headers": lambda: response_headers(answer),
        "route": lambda: routes.match("POST", "/v1/chat/completions"),
        "error body": lambda: error_response(Api.CHAT, NoBackend("none")),
        "RequestFacts()": lambda: RequestFacts(
            api=Api.CHAT, tenant="t", model="m", is_stream=True, session_key=None, prompt_key=None,
            prefix=(), num_prompt_bytes=1, max_output_tokens=1, is_follow_up=True, sets_binding=True,
            obeys_load_bound=False),
        "Message()": lambda: Message(chain_hash=1, num_bytes=1),
    }  # fmt: skip
    for name, call in calls.items():
        print(f"\n{name:<18} {measure(call):6.2f} µs", end="")
    print()


def test_stream_events() -> None:
    """One token event of about 210 bytes, alone in its read and in reads of 50."""
    event = (
        b'data: {"id":"chatcmpl-123456789012345678","object":"chat.completion.chunk","created":1764400000,'
        b'"model":"mock-model","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,'
        b'"finish_reason":null}]}\n\n'
    )
    batch = event * 50
    observer = SseObserver(Api.CHAT)
    observer.feed(event)
    alone = measure(lambda: observer.feed(event))
    together = measure(lambda: observer.feed(batch)) / 50
    print(f"\nSSE event of {len(event)} bytes: {alone:.2f} µs alone, {together:.2f} in reads of 50")
