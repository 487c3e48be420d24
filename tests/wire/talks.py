"""Conversations as clients hold them, for tests: they grow, are edited, cut and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from gateway.values import Api

MARKER = {"cache_control": {"type": "ephemeral"}}
WORDS = "the model keeps what it has read, so a turn goes home. "

TEXTS = st.sampled_from(
    [
        "",
        "hi",
        "a first question that is long enough to tell conversations apart",
        "### Task:\nmake a title",
        'she wrote "messages":[{"role":"user"}], "input": [ and } ] and "assistant"',
        "naïve café 東京 \\ \n\t",
        WORDS * 60,
        WORDS * 400,
        "data:image/png;base64," + "A" * 20_000,
    ]
)
ROLES = st.sampled_from(["user", "assistant", "user", "assistant", "system", "developer", "tool"])


@st.composite
def messages(draw: st.DrawFn) -> Any:
    """One message: mostly what clients send, sometimes what nobody should."""
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return draw(st.sampled_from([None, 7, "text", {}, [], [{"role": "user"}], {"type": "reasoning"}]))
    text = draw(TEXTS)
    content: Any = text
    if kind in (1, 2, 3):
        part = {"type": "text", "text": text} | (MARKER if kind > 1 else {})
        content = [{"type": "text", "text": "x"}, part] if draw(st.booleans()) else [part]
    role = draw(ROLES)
    return {"content": content, "role": role} if kind == 4 else {"role": role, "content": content}


@dataclass
class Talk:
    """One conversation as a client holds it."""

    api: Api
    turns: list[Any] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=lambda: {"model": "m"})
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    tenant: str = "default"
    order: int = 0
    separators: tuple[str, str] = (",", ":")
    is_indented: bool = False

    def body(self) -> bytes:
        name = "input" if self.api is Api.RESPONSES else "messages"
        members = list((self.fields | {name: self.turns}).items())
        cut = self.order % len(members)
        members = members[cut:] + members[:cut]
        indent = 1 if self.is_indented else None
        return json.dumps(
            dict(members), ensure_ascii=False, separators=self.separators, indent=indent
        ).encode()


FIELDS = st.sampled_from(
    [
        ("model", "n"), ("model", "m"), ("stream", True), ("stream", None), ("max_tokens", 7),
        ("max_completion_tokens", 9), ("max_output_tokens", 11), ("session_id", "b1"), ("session_id", "b2"),
        ("session_id", None), ("metadata", {"user_id": "user_x_session_9"}), ("metadata", {"note": "[]}"}),
        ("previous_response_id", "resp_1"), ("previous_response_id", "resp_2"), ("prompt_cache_key", "c"),
        ("system", "be brief"), ("system", "be long"), ("instructions", "be brief"),
        ("tools", [{"name": "f"}]), ("tools", [{"name": "messages", "messages": []}]),
        ("x", {"messages": [], "input": []}),
        ("user", "u" * 70), ("model", 3), ("stream", "no"),
    ]
)  # fmt: skip
HEADER_SETS = st.sampled_from(
    [
        [],
        [(b"X-Session-Id", b"s1")],
        [(b"x-session-id", b"s2")],
        [(b"session-id", b"s1"), (b"thread-id", b"t")],
        [(b"x-claude-code-session-id", b"c"), (b"x-claude-code-agent-id", b"a")],
        [(b"x-openwebui-task", b"title")],
        [(b"x-session-id", b"undefined")],
        [(b"cookie", b"sid=k; other=1")],
    ]
)


Draw = Callable[..., Any]


def change(draw: Draw, talk: Talk) -> bytes:
    """Let the client do one thing more and return the body that it sends then."""
    action = draw(st.integers(0, 13))
    turns = talk.turns
    if action <= 5:
        turns.extend(draw(st.lists(messages(), min_size=1, max_size=3)))
    elif action == 6 and turns:
        turns[draw(st.integers(0, len(turns) - 1))] = draw(messages())
    elif action == 7 and turns:
        del turns[draw(st.integers(0, len(turns) - 1)) :]
    elif action == 8 and turns:
        del turns[draw(st.integers(0, len(turns) - 1))]
    elif action == 9:
        move_markers(turns, draw(st.integers(0, 5)))
    elif action == 10:
        name, value = draw(FIELDS)
        talk.fields = talk.fields | {name: value}
    elif action == 11:
        talk.headers = draw(HEADER_SETS)
    elif action == 12:
        talk.tenant = draw(st.sampled_from(["default", "t"]))
    elif action == 13:
        talk.order = draw(st.integers(0, 9))
        talk.separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", ":")]))
        talk.is_indented = draw(st.integers(0, 5)) == 0
    body = talk.body()
    damage = draw(st.integers(0, 11))
    if damage == 0:  # one other byte
        at = draw(st.integers(0, len(body) - 1))
        body = body[:at] + bytes([draw(st.sampled_from(b'x"{}[],1 \\'))]) + body[at + 1 :]
    elif damage == 1:  # the list a second time
        body = (
            body[:-1]
            + b","
            + draw(st.sampled_from([b'"messages":[1]', b'"input":[]', b'"messages":null']))
            + b"}"
        )
    elif damage == 2:
        body = body.replace(b"hi", b"\\ud83d", draw(st.integers(1, 2)))
    return body


def move_markers(turns: list[Any], num_marked: int) -> None:
    """Mark the newest messages and nothing else, as Claude Code does."""
    for index, turn in enumerate(turns):
        if isinstance(turn, dict) and isinstance(turn.get("content"), str | list) and "role" in turn:
            content = turn["content"]
            text = content if isinstance(content, str) else content[-1].get("text", "") if content else ""
            is_marked = index >= len(turns) - num_marked
            turns[index] = turn | {
                "content": [{"type": "text", "text": text} | MARKER] if is_marked else text
            }
