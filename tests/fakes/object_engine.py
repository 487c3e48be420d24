"""What an engine that keeps files, batches and conversations answers. Its ids tell their maker's name."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from fakes.backend import Behaviour, Turn, openai_answer, respond

_PREFIX = {
    "files": "file",
    "uploads": "upload",
    "batches": "batch",
    "conversations": "conv",
    "messages/batches": "msgbatch",
}


@dataclass
class ObjectEngine:
    """The state of one engine; `answer` is its behaviour. Numbers order all engines' objects by age."""

    name: str
    numbers: Any
    objects: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # by collection, then id
    page_size: int = 100
    asked: list[str] = field(default_factory=list)

    @property
    def answer(self) -> Behaviour:
        return self._answer

    async def _answer(self, turn: Turn) -> None:
        request = turn.request
        path, _, query = request.target.partition("?")
        self.asked.append(f"{request.method} {path}")
        collection, parts = _split(path)
        if collection is None:
            await self._compute(turn)
            return
        if not parts and request.method == "POST":
            answer = self._make(collection, request)
        elif not parts:
            answer = self._list(collection, query)
        else:
            answer = self._act(collection, parts, request)
        status = 404 if answer is None else 200
        body = {"error": {"message": f"{self.name} has no such thing"}} if answer is None else answer
        await respond(body if isinstance(body, bytes) else json.dumps(body).encode(), status=status)(turn)

    async def _compute(self, turn: Turn) -> None:
        body = turn.request.json
        named = body.get("conversation")
        named = named.get("id") if isinstance(named, dict) else named
        if named is not None and named not in self.objects.get("conversations", {}):
            await respond(b'{"error":{"message":"no such conversation"}}', status=404)(turn)
        else:
            await openai_answer()(turn)

    def _make(self, collection: str, request: Any) -> dict[str, Any] | None:
        if collection == "batches" and request.json["input_file_id"] not in self.objects.get("files", {}):
            return None
        number = next(self.numbers)
        made = {"id": f"{_PREFIX[collection]}-{self.name}-{number}", "created_at": number}
        made |= {"object": _PREFIX[collection], "content": request.body.decode("latin-1")}
        self.objects.setdefault(collection, {})[made["id"]] = made
        return made

    def _list(self, collection: str, query: str) -> dict[str, Any]:
        asked = {name: values[-1] for name, values in parse_qs(query).items()}
        known = sorted(self.objects.get(collection, {}).values(), key=lambda one: -one["created_at"])
        after = asked.get("after") or asked.get("after_id")
        if after is not None:
            known = known[[one["id"] for one in known].index(after) + 1 :]
        page = known[: min(int(asked["limit"]), self.page_size)]
        return {"object": "list", "data": page, "has_more": len(page) < len(known)}

    def _act(self, collection: str, parts: list[str], request: Any) -> Any:
        found = self.objects.get(collection, {}).get(parts[0])
        if found is None:
            return None
        if parts[1:] == ["content"]:
            return found["content"].encode("latin-1")
        if parts[1:] == ["complete"]:
            return found | {"file": self._make("files", request)}
        if request.method == "DELETE":
            del self.objects[collection][parts[0]]
            return {"id": parts[0], "deleted": True}
        if collection == "batches":  # done as soon as somebody looks
            output = found.get("output_file_id")
            found["output_file_id"] = output or (self._make("files", request) or {})["id"]
        return found


def _split(path: str) -> tuple[str | None, list[str]]:
    for collection in _PREFIX:
        if path == f"/v1/{collection}" or path.startswith(f"/v1/{collection}/"):
            return collection, [part for part in path.removeprefix(f"/v1/{collection}").split("/") if part]
    return None, []


def object_engines(count: int) -> list[ObjectEngine]:
    numbers = itertools.count(1)
    return [ObjectEngine(f"b{number}", numbers) for number in range(count)]
