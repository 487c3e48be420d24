"""Reads the parts of a JSON body that routing needs, per API, and refuses bodies that no engine could serve.

Each body is decoded once and partially: names and small values are read, messages stay raw bytes. Refused
with 400 (and the field, if there is one): not JSON (RFC 8259: no NaN, no byte order mark), not an object, no
model, no messages. The engine judges everything else. If a name occurs twice, the last value counts, as in
most engines' parsers. The model decides on access and must be the one that the engine reads: where parsers
differ about it (given twice, or in capitals, which Go reads as the same name) the body is refused. Invariant:
any bytes give a `Body` or BadRequest.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from msgspec import Raw

from gateway.errors import BadRequest
from gateway.values import Api

ABSENT: Final = Raw(b"")
MAX_UNCOUNTED_BYTES: Final = 1 << 20
"""Up to this size, counting a body's items would cost more than it can save."""
_MAX_MODEL_LENGTH: Final = 512
_MAX_QUERY_FIELDS: Final = 64
_PARAM: Final = re.compile(r"(?:required field `|at `\$\.)([A-Za-z_]+)")

# Half a surrogate pair, or (group 1) both halves.
_SURROGATES: Final = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)
_MAX_REPAIRED_BYTES: Final = 4 << 20  # bounds the time that a hostile body can cost
_BACKGROUND: Final = re.compile(rb'"background"[ \t\r\n]*:[ \t\r\n]*true')


class Body(msgspec.Struct, kw_only=True, gc=False):
    """What routing needs of a body. Unread JSON values are bytes; absent ones are empty."""

    model: str | None = None
    is_stream: bool = False
    stream_options: bytes = b""  # of chats and completions
    max_output_tokens: int | None = None
    names: tuple[Raw, ...] = ()  # values of `BodyDecoder.names`, `ABSENT` where missing
    names_request: bool = False  # of a passed-through body: it says how the engine shall name it
    messages: list[Raw] | None = None  # None: the API has none, or the body has too many items to read them
    system: bytes = b""  # Anthropic `system`, Responses `instructions`
    tools: bytes = b""
    text: bytes = b""  # completions `prompt`, Responses `input` as a string, SGLang `text`


class _AnyClass(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return True


class _Model(metaclass=_AnyClass):
    """Marks the fields that `BodyDecoder._see_model` is shown, each time they occur."""


_MODEL_IN_CAPITALS: Final = [
    "".join(spelling) for spelling in itertools.product(*[(char, char.upper()) for char in "model"])
][1:]


class _ChatBody(msgspec.Struct):
    model: _Model
    messages: list[Raw]
    stream: bool | None = None
    stream_options: Raw = ABSENT
    tools: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    max_tokens: Raw = ABSENT


class _MessagesBody(msgspec.Struct):
    model: _Model
    messages: list[Raw]
    stream: bool | None = None
    tools: Raw = ABSENT
    system: Raw = ABSENT
    max_tokens: Raw = ABSENT


class _ResponsesBody(msgspec.Struct):
    model: _Model
    input: str | list[Raw] | None = None
    stream: bool | None = None
    tools: Raw = ABSENT
    instructions: Raw = ABSENT
    max_output_tokens: Raw = ABSENT


class _StreamOptions(msgspec.Struct):
    include_usage: Raw = ABSENT


_STREAM_OPTIONS_DECODER: Final = msgspec.json.Decoder(_StreamOptions)


class _ShallowBody(msgspec.Struct):
    """Of the other APIs, and of bodies with too many items: its other fields are those of `_SHALLOW`."""

    model: _Model = None  # type: ignore[assignment]  # absent


_LIMIT_FIELDS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_NOTHING: Final = (b"", b"null")
_SHALLOW: Final = ("messages", "prompt", "input", "text", "stream", "stream_options", *_LIMIT_FIELDS)

# Keyed by value and looked up with `_value_`, because the hash of an Enum member is slow Python code.
_FULL: Final[dict[str, type[msgspec.Struct]]] = {
    Api.CHAT.value: _ChatBody,
    Api.MESSAGES.value: _MessagesBody,
    Api.RESPONSES.value: _ResponsesBody,
}

# Fields that every engine requires, checked where the body is not decoded into one of the structs above.
_REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    Api.CHAT.value: ("model", "messages"),
    Api.MESSAGES.value: ("model", "messages"),
    Api.RESPONSES.value: ("model",),
    Api.COMPLETIONS.value: ("model", "prompt"),
    Api.EMBEDDINGS.value: ("model",),
}
_TEXT_FIELD: Final = {
    Api.COMPLETIONS.value: "prompt",
    Api.RESPONSES.value: "input",
    Api.GENERATE.value: "text",
}


class BodyDecoder:
    """Decodes bodies, for a given list of field names that may hold a session id."""

    def __init__(self, names: Sequence[str], *, max_items: int) -> None:
        self.names = tuple(names)
        self._max_items = max_items
        self._num_models = 0  # seen in the body that is being decoded
        attributes = [f"name_{index}" for index in range(len(self.names))]
        self._names_of: Callable[[Any], tuple[Raw, ...]] = _tuple_getter(attributes)
        rename = dict(zip(attributes, self.names, strict=True))
        self._full = {api: self._decoder(base, rename) for api, base in _FULL.items()}
        members = tuple(dict.fromkeys([*_SHALLOW, *self.names]))
        self._members = {f"member_{index}": name for index, name in enumerate(members)}
        self._shallow = self._decoder(_ShallowBody, self._members)

    def _decoder(self, base: type[msgspec.Struct], rename: dict[str, str]) -> msgspec.json.Decoder[Any]:
        """Return a decoder for `base` with more fields, named by attribute."""
        fields: list[tuple[str, Any, Any]] = [(attribute, Raw, ABSENT) for attribute in rename]
        spellings = {f"model_{index}": name for index, name in enumerate(_MODEL_IN_CAPITALS)}
        fields += [(attribute, _Model, None) for attribute in spellings]
        struct = msgspec.defstruct(base.__name__, fields, bases=(base,), rename=rename | spellings)
        return msgspec.json.Decoder(struct, dec_hook=self._see_model)

    def _see_model(self, _: type, value: object) -> object:
        self._num_models += 1
        if self._num_models > 1:
            raise ValueError("the model is given twice")
        if value is not None and value.__class__ is not str:
            raise ValueError("Expected `str`")
        return value

    def decode(self, api: Api, body: bytes) -> Body:
        """Return what routing needs of `body`. Raises BadRequest. O(len(body)); copies only messages."""
        if not body:
            raise BadRequest("the request body is empty: send a JSON object")
        try:
            return self._decode(api, body)
        except msgspec.ValidationError as error:
            raise _refused(error) from error
        except msgspec.DecodeError as error:
            repaired = _without_lone_surrogates(body)
            if repaired == body:
                raise _refused(error) from error
        except RecursionError as error:
            raise BadRequest("the body is nested too deeply") from error
        try:
            result = self._decode(api, repaired)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _refused(error) from error
        if result.model is not None and "\ufffd" in result.model:
            raise BadRequest("the field `model` has half a character", param="model")
        return result

    def from_query(self, query: str) -> Body:
        """Return the body that a query stands for, with its parameters as members.

        For WebSockets, where a browser can set neither headers nor a body. Raises BadRequest.
        """
        try:
            members = dict(parse_qsl(query, max_num_fields=_MAX_QUERY_FIELDS))
        except ValueError as error:
            raise BadRequest(f"the query has more than {_MAX_QUERY_FIELDS} parameters") from error
        model = members.get("model")
        return Body(
            model=None if model is None else _checked_model(model),
            names=tuple(
                Raw(msgspec.json.encode(members[name])) if name in members else ABSENT for name in self.names
            ),
        )

    def _decode(self, api: Api, body: bytes) -> Body:
        self._num_models = 0
        decoder = self._full.get(api._value_)
        if decoder is None or (len(body) > MAX_UNCOUNTED_BYTES and body.count(b",") > self._max_items):
            return self._from_members(api, self._shallow.decode(body))
        parsed: Any = decoder.decode(body)
        result = Body(
            model=_checked_model(parsed.model),
            is_stream=bool(parsed.stream),
            names=self._names_of(parsed),
            tools=bytes(parsed.tools),
        )
        if api is Api.CHAT:
            result.messages = parsed.messages
            result.stream_options = bytes(parsed.stream_options)
            limit = parsed.max_completion_tokens
            result.max_output_tokens = _count(parsed.max_tokens if limit is ABSENT else limit)
        elif api is Api.MESSAGES:
            result.messages = parsed.messages
            result.system = bytes(parsed.system)
            result.max_output_tokens = _count(parsed.max_tokens)
        else:
            if isinstance(parsed.input, str):
                result.text = parsed.input.encode()
            else:
                result.messages = parsed.input or []
            result.system = bytes(parsed.instructions)
            result.max_output_tokens = _count(parsed.max_output_tokens)
        return result

    def _from_members(self, api: Api, parsed: Any) -> Body:
        members: dict[str, Raw] = {
            name: value
            for attribute, name in self._members.items()
            if (value := getattr(parsed, attribute)) is not ABSENT
        }
        for name in _REQUIRED.get(api._value_, ()):
            if (parsed.model is None) if name == "model" else bytes(members.get(name, ABSENT)) in _NOTHING:
                raise BadRequest(f"the field `{name}` is missing", param=name)
        if "messages" in members and api._value_ in _FULL and bytes(members["messages"])[:1] != b"[":
            raise BadRequest("the field `messages` must be a list", param="messages")
        limits = (_count(members[name]) for name in _LIMIT_FIELDS if name in members)
        return Body(
            model=None if parsed.model is None else _checked_model(parsed.model),
            is_stream=_flag(bytes(members.get("stream", ABSENT))),
            stream_options=bytes(members.get("stream_options", ABSENT)),
            max_output_tokens=next(limits, None),
            names=tuple(members.get(name, ABSENT) for name in self.names),
            text=bytes(members.get(_TEXT_FIELD.get(api._value_, ""), ABSENT)),
        )


def asks_for_no_usage(stream_options: bytes) -> bool:
    """Whether a streamed chat or completion says that it wants no usage, or nothing of it.

    Not where that is for the engine to say: what `{}` means differs, and some values are refused.
    """
    if stream_options in (b"", b"null"):
        return True
    try:
        asked = _STREAM_OPTIONS_DECODER.decode(stream_options).include_usage
    except (msgspec.DecodeError, RecursionError):
        return False
    return bytes(asked) in (b"false", b"null")


def is_background(body: bytes) -> bool:
    """Whether a request or answer of the Responses API is of a job that outlives its connection."""
    return _BACKGROUND.search(body) is not None


def _tuple_getter(attributes: Sequence[str]) -> Callable[[Any], tuple[Raw, ...]]:
    """Like attrgetter, but returns a tuple for any number of names."""
    if len(attributes) > 1:
        return attrgetter(*attributes)
    return lambda parsed: tuple(getattr(parsed, attribute) for attribute in attributes)


def _without_lone_surrogates(body: bytes) -> bytes:
    """Replace halves of surrogate pairs with U+FFFD, for hashing only.

    JavaScript clients that cut text between the halves send them. Engines handle them in different ways, so
    the forwarded bytes keep them. msgspec refuses them, so this runs only for bodies that it has refused.
    """
    if len(body) > _MAX_REPAIRED_BYTES or (b"\\ud" not in body and b"\\uD" not in body):
        return body
    # An escaped backslash before `ud83d` makes it plain text. Replace it meanwhile with two control
    # characters, which valid JSON cannot contain.
    guarded = body.replace(rb"\\", b"\1\1")
    repaired = _SURROGATES.sub(lambda found: found.group() if found.group(1) else b"\\ufffd", guarded)
    return body if repaired == guarded else repaired.replace(b"\1\1", rb"\\")


def _refused(error: Exception) -> BadRequest:
    if isinstance(error, RecursionError):
        return BadRequest("the body is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        return BadRequest(f"the body is not valid JSON: {error}")
    found = _PARAM.search(str(error))
    if found is None:
        return BadRequest("the body must be a JSON object")
    return BadRequest(f"the body was refused: {error}", param=found.group(1))


def _checked_model(model: str | None) -> str:
    if model is None:
        raise BadRequest("the field `model` is missing", param="model")
    if not model.strip():
        raise BadRequest("the field `model` is empty", param="model")
    if len(model) > _MAX_MODEL_LENGTH:
        raise BadRequest(f"the field `model` is longer than {_MAX_MODEL_LENGTH} characters", param="model")
    return model


def _flag(value: bytes) -> bool:
    if value not in (b"", b"null", b"true", b"false"):
        raise BadRequest("the field `stream` must be true or false", param="stream")
    return value == b"true"


def _count(value: Raw) -> int | None:
    """Return a non-negative JSON integer of reasonable size, else None: the engine judges other values."""
    digits = bytes(value)
    return int(digits) if len(digits) <= 12 and digits.isdigit() else None
