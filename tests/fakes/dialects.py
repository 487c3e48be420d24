"""The API dialects as the fault tests need them: a request of each, and how a broken stream must end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API path with a minimal body."""

    name: str
    path: str
    body: dict[str, Any]
    can_stream: bool = True
    names_events: bool = False  # its errors come as `event: error`

    def encode(self, *, stream: bool) -> bytes:
        return json.dumps({**self.body, **({"stream": True} if stream else {})}).encode()

    def error_code(self, body: bytes) -> str:
        """The code (Anthropic: the type) of an error body, whose shape is checked."""
        loaded = json.loads(body)
        error = loaded["error"]
        if self.name == "messages":
            assert loaded["type"] == "error"
            return str(error["type"])
        assert {"message", "type", "code"} <= set(error)
        return str(error["code"])

    def error_event(self, stream: bytes) -> dict[str, Any]:
        """The last event of a broken stream, which must be this dialect's error."""
        last = stream[stream.rindex(b"data: ") :]
        if self.names_events:
            assert stream.endswith(b"event: error\n" + last), stream
        assert last.endswith(b"\n\n"), stream
        loaded = json.loads(last.removeprefix(b"data: "))
        assert "error" in loaded
        assert isinstance(loaded, dict)
        return loaded


MESSAGES = [{"role": "user", "content": "hi"}]
DIALECTS = (
    Dialect(name="chat", path="/v1/chat/completions", body={"model": "fake-model", "messages": MESSAGES}),
    Dialect(name="completions", path="/v1/completions", body={"model": "fake-model", "prompt": "hi"}),
    Dialect(
        name="responses",
        path="/v1/responses",
        body={"model": "fake-model", "input": "hi"},
        names_events=True,
    ),
    Dialect(
        name="messages",
        path="/v1/messages",
        body={"model": "fake-model", "max_tokens": 5, "messages": MESSAGES},
        names_events=True,
    ),
    Dialect(name="generate", path="/generate", body={"text": "hi"}),
    Dialect(
        name="embeddings",
        path="/v1/embeddings",
        body={"model": "fake-model", "input": "hi"},
        can_stream=False,
    ),
)
CASES = [(dialect, False) for dialect in DIALECTS] + [
    (dialect, True) for dialect in DIALECTS if dialect.can_stream
]
CASE_IDS = [f"{dialect.name}{'-stream' if stream else ''}" for dialect, stream in CASES]
