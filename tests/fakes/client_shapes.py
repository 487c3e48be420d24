"""Clients as they talk: where each puts its ids, and what it asks beside its conversation.

Shapes only, in our own words, except for the few words and names that a client is recognised by. Ids stand as
`{session}` (of the conversation), `{agent}` (of a sub-agent), `{person}` (the same in all conversations) and
`{request}` (never the same twice).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.values import Api

CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
COUNT: Final = "/v1/messages/count_tokens"
COUNT_INPUT: Final = "/v1/responses/input_tokens"
APIS: Final = {
    CHAT: Api.CHAT,
    MESSAGES: Api.MESSAGES,
    COUNT: Api.MESSAGES,
    RESPONSES: Api.RESPONSES,
    COUNT_INPUT: Api.RESPONSES,
}

Headers = dict[str, str]
Fields = dict[str, Any]

_LONG: Final = "Why does the parser reject a file whose last line has no line break? Where is it decided?"
_SYSTEM: Final = "You help people to change programs. Read before you write. Be brief. " * 8


@dataclass(frozen=True, kw_only=True)
class Helper:
    """A request beside the conversation, as a rule under its id: no turn of it."""

    name: str
    ask: str | tuple[str, ...]  # user messages
    system: tuple[str, ...] = ()
    path: str | None = None  # None: where its client's turns go
    headers: Headers = field(default_factory=dict)
    fields: Fields = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client program."""

    source: str  # where the id of its conversation is found
    path: str = CHAT
    headers: Headers = field(default_factory=dict)
    fields: Fields = field(default_factory=dict)
    agent: Headers | None = None  # headers in which a sub-agent's turns differ; None: it has no sub-agents
    agent_fields: Fields = field(default_factory=dict)
    helpers: tuple[Helper, ...] = ()
    system: tuple[str, ...] = (_SYSTEM,)
    opening: str = _LONG
    has_tools: bool = True

    @property
    def has_id(self) -> bool:
        return self.source != "fingerprint"

    @property
    def num_unnamed(self) -> int:
        """How many of the first turns nobody can tell from those of others: they begin with "Hi"."""
        return 1 if not self.has_id and len(self.opening) < 10 else 0


_numbers = itertools.count(1)


def fill(value: Any, ids: dict[str, str]) -> Any:
    """Return `value` with its ids filled in."""
    if isinstance(value, dict):
        return {name: fill(member, ids) for name, member in value.items()}
    if isinstance(value, list):
        return [fill(member, ids) for member in value]
    if isinstance(value, str):
        for name, text in (ids | {"request": f"request-{next(_numbers)}"}).items():
            value = value.replace("{" + name + "}", text)
    return value


class Conversation:
    """One conversation, as its client holds it."""

    def __init__(self, client: Client, session: str, *, agent: str | None = None) -> None:
        ids = {"session": session, "person": "person-1", "agent": agent or ""}
        self._client, self._ids, self._is_agent = client, ids, agent is not None
        # an agent asks for something else, under a system prompt of its own
        self._system = client.system if agent is None else ("Look for files. Answer with their names only.",)
        self._opening = client.opening if agent is None else f"Find all that {agent} needs. " * 3
        self._turns: list[Fields] = []
        self._num_turns = 0

    def ask(self) -> tuple[Headers, Fields]:
        """Add the next question, or the result of a tool, and return the request."""
        number = self._num_turns
        self._num_turns += 1
        if number == 0:
            self._turns.append(self._user(self._opening))
        elif number % 3 == 2 and self._client.has_tools:
            self._turns += self._tool_round(number)
        else:
            self._turns.append(self._user(f"And what about the case of {number} files? " * 4))
        return self.again()

    def again(self, *, num_retries: int = 0) -> tuple[Headers, Fields]:
        """Return the request for the newest turn, as a retry repeats it."""
        client = self._client
        headers = client.headers | {"x-stainless-retry-count": str(num_retries)}
        fields = client.fields
        if self._is_agent:
            headers, fields = headers | (client.agent or {}), fields | client.agent_fields
        body = {"model": "fake-model", **fields, **self._prompt(self._system, self._turns)}
        if client.has_tools:
            body["tools"] = [self._tool("read_file")]
        return fill(headers, self._ids), fill(body, self._ids)

    def hear(self) -> None:
        """The answer, as the client keeps it."""
        self._turns.append({"role": "assistant", "content": f"It is so, for {self._num_turns} reasons. " * 6})

    def compact(self) -> None:
        """Replace the history by a summary."""
        self._turns = [self._user("What was found so far: the parser counts breaks, not lines. " * 3)]
        self.hear()

    def helper(self, helper: Helper) -> tuple[str, Headers, Fields]:
        """Return path, headers and body of a request beside the conversation. No two say the same."""
        asks = (helper.ask,) if isinstance(helper.ask, str) else helper.ask
        asks = (*asks[:-1], f"{asks[-1]} {next(_numbers)}")
        client = self._client
        body = {"model": "fake-model", **client.fields}
        body |= self._prompt(helper.system, [self._user(ask) for ask in asks])
        headers = fill(client.headers | helper.headers, self._ids)
        return helper.path or client.path, headers, fill(body | helper.fields, self._ids)

    def _user(self, text: str) -> Fields:
        if self._client.path == CHAT:
            return {"role": "user", "content": text}
        kind = "text" if self._client.path == MESSAGES else "input_text"
        return {"role": "user", "content": [{"type": kind, "text": text}]}

    def _prompt(self, system: tuple[str, ...], turns: list[Fields]) -> Fields:
        if self._client.path == RESPONSES:
            return {"instructions": "\n".join(system), "input": list(turns)} if system else {"input": turns}
        if self._client.path == MESSAGES:
            blocks = [{"type": "text", "text": text} for text in system]
            return {"max_tokens": 4096, **({"system": blocks} if system else {}), "messages": list(turns)}
        first = [{"role": "system", "content": "\n".join(system)}] if system else []
        return {"messages": [*first, *turns]}

    def _tool_round(self, number: int) -> list[Fields]:
        call, result = f"call-{number}", f"Line {number} of the file. " * 20
        if self._client.path == RESPONSES:
            return [
                {"type": "function_call", "call_id": call, "name": "read_file", "arguments": "{}"},
                {"type": "function_call_output", "call_id": call, "output": result},
            ]
        if self._client.path == MESSAGES:
            use = {"type": "tool_use", "id": call, "name": "read_file", "input": {}}
            found = {
                "type": "tool_result",
                "tool_use_id": call,
                "content": [{"type": "text", "text": result}],
            }
            return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
        function = {"name": "read_file", "arguments": "{}"}
        calls = [{"id": call, "type": "function", "function": function}]
        return [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": call, "content": result},
        ]

    def _tool(self, name: str) -> Fields:
        schema = {"type": "object", "properties": {"path": {"type": "string"}}}
        about = {"name": name, "description": "Reads a file."}
        if self._client.path == MESSAGES:
            return about | {"input_schema": schema}
        if self._client.path == RESPONSES:
            return {"type": "function", "strict": False, **about, "parameters": schema}
        return {"type": "function", "function": about | {"parameters": schema}}
