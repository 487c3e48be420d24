"""The objects that engines keep and name by id: files, uploads, batches, conversations, stored responses.

One table says what each kind is called in paths, in bodies and in answers. An object is only where it was
made, so its id leads to its maker, and with tenants an id is worth something only to the tenant whose request
made it. Invariants: ids are learned only from answers that describe an object of a kind that the path names,
never from what a client has stored; an id that a body names is found however it is spelled (escapes too), or
the body is refused. Knows nothing about backends or bindings.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

import msgspec

from gateway.errors import BadRequest
from gateway.values import Api

_GET: Final = ("GET", "HEAD")
_POST: Final = ("POST",)
_ITEM: Final = "/items/*"
MAX_NAMED: Final = 64
"""Different objects that one request may name."""
MAX_ID_LENGTH: Final = 256

Action = tuple[str, tuple[str, ...]]
"""What follows the id in a path (`*` is another id), and the methods that it takes."""


class Kind(NamedTuple):
    """One kind of object."""

    name: str  # part of every key of its ids, so that equal ids of two kinds differ
    path: str  # of the collection
    api: Api
    actions: dict[str, tuple[str, ...]]  # by what follows the id in a path
    describing: frozenset[str]  # actions whose answer is an object that this kind may have made
    methods: tuple[str, ...] = _POST  # of the collection
    body_names: tuple[tuple[str, str], ...] = ()  # members of a body that name objects, and their kind
    answer_names: tuple[tuple[str, str], ...] = ()  # members of an answer that name new ones, and their kind


RESPONSE: Final = Kind(
    "response",
    "/v1/responses",
    Api.RESPONSES,
    {"": (*_GET, "DELETE"), "/cancel": _POST, "/input_items": _GET},
    frozenset({"", "/cancel"}),
)
CONVERSATION: Final = Kind(
    "conversation",
    "/v1/conversations",
    Api.OBJECTS,
    {"": (*_GET, "POST", "DELETE"), "/items": (*_GET, "POST"), _ITEM: (*_GET, "DELETE")},
    frozenset({""}),
    answer_names=(("id", "conversation"),),
)
FILE: Final = Kind(
    "file",
    "/v1/files",
    Api.OBJECTS,
    {"": (*_GET, "DELETE"), "/content": _GET},
    frozenset({""}),
    methods=(*_GET, "POST"),
    answer_names=(("id", "file"),),
)
_UPLOAD: Final = Kind(
    "upload",
    "/v1/uploads",
    Api.OBJECTS,
    {"": _GET, "/parts": _POST, "/complete": _POST, "/cancel": _POST},
    frozenset({"", "/complete"}),
    answer_names=(("id", "upload"), ("file.id", "file")),
)
_BATCH: Final = Kind(
    "batch",
    "/v1/batches",
    Api.OBJECTS,
    {"": _GET, "/cancel": _POST},
    frozenset({"", "/cancel"}),
    methods=(*_GET, "POST"),
    body_names=(("input_file_id", "file"),),
    answer_names=(("id", "batch"), ("output_file_id", "file"), ("error_file_id", "file")),
)
_MESSAGE_BATCH: Final = Kind(
    "message_batch",
    "/v1/messages/batches",
    Api.MESSAGE_BATCHES,
    {"": (*_GET, "DELETE"), "/cancel": _POST, "/results": _GET},
    frozenset({"", "/cancel"}),
    methods=(*_GET, "POST"),
    answer_names=(("id", "message_batch"),),
)
KINDS: Final = (FILE, _UPLOAD, _BATCH, CONVERSATION, _MESSAGE_BATCH)
"""The kinds with a collection of their own; responses are made by the Responses API."""

# An id is copied into a path for a backend, so its alphabet is restricted and has no dot.
_ID: Final = rf"[A-Za-z0-9_-]{{1,{MAX_ID_LENGTH}}}"
_OBJECT_PATH: Final = re.compile(
    rf"({'|'.join(kind.path for kind in (*KINDS, RESPONSE))})(?:/({_ID})(/[a-z_]+)?(/{_ID})?)?"
)
_BY_PATH: Final = {kind.path: kind for kind in (*KINDS, RESPONSE)}
_NO_RESPONSE_IDS: Final = (None, "input_tokens", "compact")
"""What follows `/v1/responses` in the paths of its operations."""
_PREFIXES: Final = tuple(f"{kind.path}/" for kind in KINDS)


class Place(NamedTuple):
    """What a path says: a kind, one of its objects unless it is the collection, and an action."""

    kind: Kind
    object_id: str | None
    action: str

    @property
    def methods(self) -> tuple[str, ...]:
        return self.kind.methods if self.object_id is None else self.kind.actions[self.action]

    @property
    def is_collection(self) -> bool:
        return self.object_id is None

    @property
    def takes_form(self) -> bool:
        """Whether its body is a form with a file in it, and not JSON."""
        return self.action == "/parts" or (self.kind is FILE and self.is_collection)

    @property
    def computes(self) -> bool:
        """Whether a POST here has an engine compute answers, with models that are not in sight."""
        return self.is_collection and self.kind in (_BATCH, _MESSAGE_BATCH)

    def learns(self, method: str) -> bool:
        """Whether the answer to this method describes an object, so that ids can be learned from it."""
        if method == "DELETE" or self.kind is RESPONSE:
            return False
        return self.action in self.kind.describing and (self.object_id is not None or method == "POST")


def place_of(path: str) -> Place | None:
    """Return what a normalised path says of objects, None if it is about none."""
    found = _OBJECT_PATH.fullmatch(path)
    if found is None:
        return None
    kind, (_, object_id, action, item) = _BY_PATH[found[1]], found.groups()
    suffix = (action or "") + ("/*" if item else "")
    if kind is RESPONSE and object_id in _NO_RESPONSE_IDS:
        return None
    if object_id is not None and suffix not in kind.actions:
        return None
    return Place(kind, object_id, suffix)


def is_reserved(path: str) -> bool:
    """Whether only this table may serve a path: passed through, it would go round the tenants' check."""
    return path.startswith(_PREFIXES)


# -- in bodies

_FILE_ID: Final = b"file_id"
_ESCAPED: Final = re.compile(rb"\\u00(?:5[fF]|6[4569cC])")
"""A letter of `file_id` as an escape. No JSON writer does that."""
_LISTS: Final = ("messages", "input", "items", "requests", "system", "tools")
_WITHIN: Final = ("content", "output", "container", "params", "messages")  # the last two: in a batch
_MAX_DEPTH: Final = 16
"""The deepest that means anything is a tool's result with content, in a message, in a batch's request."""


def may_name_files(content: bytes, start: int = 0) -> bool:
    """Whether `content` from `start` on could name files; at most 1 ns a byte.

    A single rare byte is found thirty times as fast as a word, so each search begins at the first one.
    """
    underscore, backslash = content.find(b"_", start), content.find(b"\\", start)
    if underscore >= 0 and content.find(_FILE_ID, max(start, underscore - len(_FILE_ID))) >= 0:
        return True
    return backslash >= 0 and _ESCAPED.search(content, backslash) is not None


def named_files(content: bytes) -> list[str]:
    """Return the ids of files that the content parts of a JSON body name. Raises BadRequest.

    Arguments of tools are the client's own and are not looked into.
    """
    found: dict[str, None] = {}
    body = _decoded(content)
    for name in _LISTS:
        _walk(body.get(name), found, _MAX_DEPTH)
    return list(found)


def named_objects(place: Place, content: bytes) -> list[tuple[str, str]]:
    """Return (kind, id) of all that the body of a request about objects names. Raises BadRequest."""
    body = _decoded(content)
    named = [(FILE.name, file_id) for file_id in named_files(content)]
    for member, other in place.kind.body_names if place.object_id is None else ():
        value = body.get(member)
        if value is not None and not isinstance(value, str):
            raise BadRequest(f"the field `{member}` must be a string", param=member)
        if value is not None:
            named.append((other, value))
    return named


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        try:
            body = msgspec.json.decode(content)
        except msgspec.DecodeError:
            body = json.loads(content)  # takes halves of surrogate pairs
    except (ValueError, RecursionError) as error:
        raise BadRequest("the body is not valid JSON, or nested too deeply") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _walk(value: Any, found: dict[str, None], depth: int) -> None:
    if depth == 0 and isinstance(value, (list, dict)):
        raise BadRequest("the body's content is nested too deeply")
    if isinstance(value, list):
        for element in value:
            _walk(element, found, depth - 1)
    elif isinstance(value, dict):
        for holder in (value, value.get("file"), value.get("source")):
            if isinstance(holder, dict):
                _note(holder.get("file_id"), found)
        file_ids = value.get("file_ids")
        for file_id in file_ids if isinstance(file_ids, list) else ():
            _note(file_id, found)
        for name in _WITHIN:
            _walk(value.get(name), found, depth - 1)


def _note(file_id: Any, found: dict[str, None]) -> None:
    if isinstance(file_id, str):
        found[file_id] = None
        if len(found) > MAX_NAMED:
            raise BadRequest(f"the body names more than {MAX_NAMED} files")


# -- in answers


def made_ids(kind: Kind, body: bytes) -> list[tuple[str, str]]:
    """Return (kind, id) of what an answer that describes an object tells of. Never fails."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return []
    return ids_in(kind, answer) if isinstance(answer, dict) else []


def ids_in(kind: Kind, described: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (kind, id) of all objects that a description names as its engine's own."""
    made = []
    for member, other in kind.answer_names:
        first, _, rest = member.partition(".")
        value = described.get(first)
        if rest and isinstance(value, dict):
            value = value.get(rest)
        if isinstance(value, str) and 0 < len(value) <= MAX_ID_LENGTH:
            made.append((other, value))
    return made
