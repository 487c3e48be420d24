"""What is remembered of conversations, so that a turn costs what is new in it.

A body repeats the one before it: the head `{"model":…,"messages":[`, the messages of then, and something new.
For each conversation the memory keeps a hash of the bytes up to the end of a message, and what was found in
them.

    { "model": …, "messages": [ m, m, m, m,│ m, m ], "stream": … }
                              ↑ start      ↑ end

Where a body begins with the same `end` bytes, a marker takes the place of `start` to `end`, and only that is
decoded. JSON is read from left to right, so whatever follows means the same after the marker as after the
messages. The marker is a string that nobody outside can know: found as the first message, it proves that the
messages of this very body begin at `start`, and that nothing is taken for them that only looks like them.

Invariant: what is remembered changes no result, only its cost. Kept are hashes, sizes and the ids that name
the session, but no prompt text. A look-up only guesses which conversation this is; the hash decides.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final

import msgspec
from msgspec import Raw
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_intdigest

from gateway.errors import GatewayError
from gateway.values import Api, SessionKey
from gateway.wire.bodies import ABSENT, MAX_UNCOUNTED_BYTES, Body, BodyDecoder
from gateway.wire.cascade import Identity, Key
from gateway.wire.keys import Marks, Scope
from gateway.wire.prompts import Progress, Prompt

# By value: the hash of an Enum member is Python code.
_LIST_OPENING: Final = {
    api: re.compile(rb'"%b"[ \t\r\n]*:[ \t\r\n]*\[[ \t\r\n]*' % name)
    for api, name in (
        (Api.CHAT.value, b"messages"),
        (Api.MESSAGES.value, b"messages"),
        (Api.RESPONSES.value, b"input"),
    )
}
Place = tuple[int, str, Marks]
"""Where a conversation is looked for: a hash of how its body begins, the API, what its headers say."""

_COMMA: Final = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")
_ANSWER: Final = b'"assistant"'
_OPENING_BYTES: Final = 64  # enough to hold the model where that comes first, as with most clients
_OPENING_REACH: Final = 65_536  # how far a first answer is searched for, at 0.35 ns a byte
_MAX_ID_BYTES: Final = 1_024
_ENTRY_BYTES: Final = 1_280  # measured, without prefix and ids
_MESSAGE_BYTES: Final = 112
MIN_BYTES: Final = 8_192
"""Smaller bodies are read from the start: remembering would cost more than it can save."""


class Request(msgspec.Struct, gc=False):
    """One request as the memory sees it."""

    api: Api
    marks: Marks
    content: bytes  # its body, opened
    seed: int  # of its tenant
    opening: int = 0  # how many bytes tell this conversation from others; 0: it is not worth remembering


class Reading(msgspec.Struct, gc=False):
    """All that was found in one request."""

    body: Body
    scope: Scope
    identity: Identity
    prompt: Prompt
    fingerprint: Key | None = None
    found: Found | None = None  # what it went on from
    file_keys: tuple[SessionKey, ...] = ()  # of files that its content names


class Known(msgspec.Struct, frozen=True, gc=False):
    """What is known of one conversation. Equal bytes up to `end` mean equal messages up to `progress`."""

    scope: Scope
    start: int  # of the first message in the body
    end: int  # of the last message in `progress`
    digest: int  # of the body up to `end`
    outside: int  # hash of system prompt and tools that are no messages
    progress: Progress
    names: tuple[Raw, ...]
    identity: Identity  # what headers and these names give
    fingerprint: Key | None
    num_bytes: int


class Found(msgspec.Struct, frozen=True, gc=False):
    """A conversation whose beginning a body repeats, and the rest of that body."""

    known: Known
    hash_to_end: xxh3_128  # of the body up to `known.end`
    body: Body  # its messages are those after `known.progress`


class Conversations:
    """The memory: when it is full, the conversations that were not used for longest go."""

    def __init__(self, decoder: BodyDecoder, marker: bytes, *, max_bytes: int, min_bytes: int) -> None:
        """`marker` is a JSON value that nobody can guess."""
        self._decoder = decoder
        self._marker = marker
        self._first_message = Raw(marker)
        self._entries: OrderedDict[Place, Known] = OrderedDict()
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._min_bytes = min_bytes

    def watches(self, content: bytes) -> bool:
        """Whether remembering a body of this size pays."""
        return self._min_bytes <= len(content) <= MAX_UNCOUNTED_BYTES and self._max_bytes > 0

    def find(self, request: Request) -> Found | None:
        """Return the conversation that `request` goes on with. Changes `request`.

        Tenant, model and what stands outside the messages are the caller's to compare (`is_same_scope`).
        """
        content = request.content
        request.opening = _opening(request)
        if request.opening == 0:
            return None
        place = _place(request)
        known = self._entries.get(place)
        if known is None:
            return None
        self._entries.move_to_end(place)
        if len(content) <= known.end:
            return None
        hash_to_end = xxh3_128(memoryview(content)[: known.end], known.scope.seed)
        if hash_to_end.intdigest() != known.digest:
            return None
        rest = b"%b%b%b" % (content[: known.start], self._marker, content[known.end :])
        try:
            body = self._decoder.decode(request.api, rest)
        except GatewayError:
            return None  # the whole body will tell better what is wrong with it
        if not body.messages or body.messages[0] != self._first_message:
            return None
        body.messages = body.messages[1:]
        return Found(known, hash_to_end, body)

    def is_far_behind(self, request: Request, found: Found) -> bool:
        """Whether so much is new that the next turn should not have to read it again."""
        return len(request.content) - found.known.end > self._min_bytes // 2

    def keep(self, request: Request, reading: Reading) -> None:
        """Remember what the next turn may repeat of `reading`, if it tells its progress."""
        progress = reading.prompt.progress
        if progress is None:
            return
        span = _settled_span(request, reading)
        names = reading.body.names
        num_id_bytes = sum([len(value) for _, value in request.marks]) + sum(map(len, names))
        if span[1] == 0 or num_id_bytes > _MAX_ID_BYTES:
            return
        is_told = reading.prompt.opening_end <= progress.roles.num_read  # else what follows may change it
        known = Known(
            scope=reading.scope,
            start=span[0],
            end=span[1],
            digest=_digest(request, reading, span[1]),
            outside=outside_hash(reading.body, reading.scope),
            progress=progress,
            # a view would keep the whole body alive
            names=tuple([name if name is ABSENT else name.copy() for name in names]),
            identity=reading.identity,
            fingerprint=reading.fingerprint if is_told else None,
            num_bytes=_ENTRY_BYTES + 2 * num_id_bytes + _MESSAGE_BYTES * len(progress.prefix),
        )
        self._store(_place(request), known)

    def _store(self, place: Place, known: Known) -> None:
        entries = self._entries
        before = entries.pop(place, None)
        if before is not None:
            self._num_bytes -= before.num_bytes
        entries[place] = known
        self._num_bytes += known.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = entries.popitem(last=False)
            self._num_bytes -= oldest.num_bytes


def is_same_scope(known: Known, scope: Scope, body: Body) -> bool:
    """Whether `body` has the tenant, model, system prompt and tools of what is known."""
    return scope == known.scope and outside_hash(body, scope) == known.outside


def outside_hash(body: Body, scope: Scope) -> int:
    """Hash what belongs to the system block and is no message."""
    if not (body.system or body.tools):
        return 0
    return xxh3_128_intdigest(body.system, xxh3_64_intdigest(body.tools, scope.seed))


def _opening(request: Request) -> int:
    """Return how many bytes tell a conversation from others; 0 where it is not worth remembering.

    With a session header the first few are enough. Without one it is everything before the first answer. A
    body without header and answer may be one of many that are never gone on with: remembering is for those
    that are. Roles open their messages as a rule, so the message before the answer ends where the last object
    before it does.
    """
    for role, _ in request.marks:
        if role.__class__ is int:
            return _OPENING_BYTES
    answer = request.content.find(_ANSWER, 0, _OPENING_REACH)
    return 0 if answer < 0 else request.content.rfind(b"}", 0, answer) + 1


def _place(request: Request) -> Place:
    """Return where a conversation is looked for."""
    start = memoryview(request.content)[: request.opening]
    return xxh3_64_intdigest(start, request.seed), request.api._value_, request.marks


def _settled_span(request: Request, reading: Reading) -> tuple[int, int]:
    """Return where the messages begin and where the last settled one ends; the end is 0 if that is not sure.

    Sure it is where they stand one after the other with equal separators, as JSON writers put them.
    """
    content, messages = request.content, reading.body.messages or []
    settled = messages[: len(messages) - reading.prompt.num_unsettled]
    if reading.found is not None:
        known = reading.found.known
        start, at = known.start, known.end
        comma = _COMMA.match(content, at)
        opening = comma.group() if comma else b""
    else:
        found = _LIST_OPENING[request.api._value_].search(content)
        if found is None:
            return 0, 0
        start = at = found.end()
        comma = _COMMA.match(content, start + len(settled[0]))
        opening = b""
    if not settled:
        return start, at
    text = opening + (comma.group() if comma else b"").join(settled)
    end = at + len(text)
    return start, end if content.startswith(text, at) else 0


def _digest(request: Request, reading: Reading, end: int) -> int:
    content = memoryview(request.content)
    found = reading.found
    if found is None:
        return xxh3_128_intdigest(content[:end], reading.scope.seed)
    found.hash_to_end.update(content[found.known.end : end])
    return found.hash_to_end.intdigest()
