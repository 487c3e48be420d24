"""Multi-turn chat bodies for the benchmark: one per session, of a given size, the same on every machine.

A quarter of each body is a system prompt shared by all sessions; the rest are turns of ordinary words, some
of them not ASCII. The `-growing` files hold conversations of eight turns instead, whose prompts grow by one
answer and one question a turn to twice the named size, which is their mean; one request in eight begins anew.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

NUM_SESSIONS = 64
NUM_TURNS = 8
SIZES_BYTES = {"1k": 1_024, "16k": 16_384, "128k": 131_072}
NUM_MANY_SESSIONS = 1_024
NUM_MESSAGES = (2, 200, 2_000)
MESSAGES_BYTES = 65_536
TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so said what up its
about into than them can only other new some could time these two may then do first any my now such like our
over man me even most made after naïve café 東京 “quoted” "json" back\\slash
"""


def write_bodies(folder: Path) -> dict[str, Path]:
    """Write `<size>.jsonl` and `<size>-stream.jsonl`; return them by name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, size_bytes in SIZES_BYTES.items():
        for suffix, is_stream in (("", False), ("-stream", True)):
            path = folder / f"{name}{suffix}.jsonl"
            lines = [_body(session, size_bytes, is_stream=is_stream) for session in range(NUM_SESSIONS)]
            path.write_text("\n".join(lines) + "\n")
            files[path.stem] = path
        path = folder / f"{name}-growing.jsonl"
        path.write_text("\n".join(_growing(size_bytes)) + "\n")
        files[path.stem] = path
    return files


def write_curve_bodies(folder: Path) -> dict[str, Path]:
    """What the curves need beside `write_bodies`; return them by name.

    `1k-many` holds more sessions than a fleet has backends. Each request of `1k-new` is a session of its own,
    with one of 64 prompts.
    """
    lines = {
        f"{num_messages}-messages": [_of_messages(session, num_messages) for session in range(NUM_SESSIONS)]
        for num_messages in NUM_MESSAGES
    }
    lines["1m"] = [_body(session, 1_048_576, is_stream=False) for session in range(16)]
    lines["1k-new"] = [
        f"new-{session}\t{_body(session, 1_024, is_stream=False)}" for session in range(NUM_SESSIONS)
    ]
    for name, is_stream in (("1k-many", False), ("1k-many-stream", True)):
        lines[name] = [_body(session, 1_024, is_stream=is_stream) for session in range(NUM_MANY_SESSIONS)]
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, bodies in lines.items():
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("\n".join(bodies) + "\n")
    return files


def _of_messages(session: int, num_messages: int) -> str:
    """One conversation of `MESSAGES_BYTES`, in that many messages of about equal size."""
    rng = random.Random(3_000 + session)
    envelope_bytes = len('{"role":"user","content":""},')
    num_bytes = MESSAGES_BYTES // num_messages - envelope_bytes
    messages = [{"role": "user", "content": _text(rng, num_bytes)[:num_bytes]} for _ in range(num_messages)]
    body = {"model": "mock-model", "stream": False, "max_tokens": 64, "messages": messages}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def _growing(mean_bytes: int) -> list[str]:
    """Turn by turn, all conversations side by side: between two turns of one stand those of all others."""
    sessions = range(NUM_SESSIONS)
    system = {"role": "system", "content": _text(random.Random(1), mean_bytes // 4)}
    messages = [[system] for _ in sessions]
    rngs = [random.Random(2_000 + session) for session in sessions]
    turn_bytes = max(40, (2 * mean_bytes - mean_bytes // 4) // (NUM_TURNS + 1) - 64)
    lines = []
    for _ in range(NUM_TURNS):
        for session in sessions:
            rng, said = rngs[session], messages[session]
            if len(said) > 1:
                said.append({"role": "assistant", "content": _text(rng, turn_bytes // 2)})
            said.append({"role": "user", "content": _text(rng, turn_bytes // 2)})
            body = {"model": "mock-model", "max_tokens": 64, "user": f"user-{session}", "messages": said}
            text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
            lines.append(f"conversation-{session}\t{text}")
    return lines


def _body(session: int, size_bytes: int, *, is_stream: bool) -> str:
    rng = random.Random(1_000 + session)
    messages = [{"role": "system", "content": _text(random.Random(1), size_bytes // 4)}]
    turn_bytes = max(120, min(2_000, size_bytes // 6))
    left = size_bytes - size_bytes // 4 - 200  # the envelope
    while left > 0:
        role = "user" if len(messages) % 2 else "assistant"
        messages.append({"role": role, "content": _text(rng, min(turn_bytes, left))})
        left -= turn_bytes + 32
    body = {"model": "mock-model", "stream": is_stream, "max_tokens": 64, "user": f"user-{session}"}
    return json.dumps({**body, "messages": messages}, ensure_ascii=False, separators=(",", ":"))


def _text(rng: random.Random, num_bytes: int) -> str:
    vocabulary = TEXT.split()
    words: list[str] = []
    size = 0
    while size < num_bytes:
        words.append(rng.choice(vocabulary))
        size += len(words[-1].encode()) + 1
    return " ".join(words)
