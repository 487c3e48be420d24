"""Reads usage, finish reason and id from the JSON of an answer.

One lenient Struct per dialect is used for complete answers and for stream events. Invariant: never fails and
never changes a byte; a value of an unexpected type counts as not reported. Knows nothing about streams (`sse`
does) or about what the numbers are used for.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw

from gateway.values import Api, Usage
from gateway.wire.usage import WireUsage, merge_usage

_NO_RAW: Final = Raw(b"")


class ChatAnswer(msgspec.Struct, gc=False):
    """Chat, completions and APIs with the same format; also one chunk of their streams."""

    id: str | None = None
    choices: list[Choice] | None = None
    usage: WireUsage | None = None
    timings: Timings | None = None
    error: Raw = _NO_RAW


class Choice(msgspec.Struct, gc=False):
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Delta(msgspec.Struct, gc=False):
    content: Raw = _NO_RAW
    reasoning_content: Raw = _NO_RAW
    reasoning: Raw = _NO_RAW
    refusal: Raw = _NO_RAW
    tool_calls: Raw = _NO_RAW


class Timings(msgspec.Struct, gc=False):
    """What llama.cpp tells in the last chunk of every stream, whether or not usage was asked for."""

    cache_n: int | None = None  # prompt tokens from the cache; older releases do not tell
    prompt_n: int | None = None  # those computed
    predicted_n: int | None = None

    @property
    def usage(self) -> WireUsage:
        is_told = self.cache_n is not None and self.prompt_n is not None
        return WireUsage(
            prompt_tokens=(self.cache_n or 0) + (self.prompt_n or 0) if is_told else None,
            completion_tokens=self.predicted_n,
            cached_tokens=self.cache_n,
        )


class AnthropicAnswer(msgspec.Struct, gc=False):
    """A message, or one event of its stream."""

    type: str = ""
    error: Raw = _NO_RAW
    id: str | None = None
    stop_reason: str | None = None
    usage: WireUsage | None = None
    message: AnthropicAnswer | None = None  # of `message_start`
    delta: AnthropicDelta | None = None


class AnthropicDelta(msgspec.Struct, gc=False):
    stop_reason: str | None = None


class ResponsesAnswer(msgspec.Struct, gc=False):
    """A response, or one event of its stream."""

    type: str = ""
    id: str | None = None
    status: str | None = None
    usage: WireUsage | None = None
    error: Raw = _NO_RAW
    code: Raw = _NO_RAW  # of an `error` event
    background: bool | None = None
    response: ResponsesAnswer | None = None


class GenerateAnswer(msgspec.Struct, gc=False):
    """SGLang's native API. In streams, each event repeats the counts so far."""

    text: str | None = None
    meta_info: GenerateInfo | None = None
    error: Raw = _NO_RAW


class ErrorObject(msgspec.Struct, gc=False):
    """An engine's error object, of any dialect."""

    type: Raw = _NO_RAW
    code: Raw = _NO_RAW
    message: Raw = _NO_RAW
    object: Raw = _NO_RAW
    error: Raw = _NO_RAW


class FinishReason(msgspec.Struct, gc=False):
    type: str | None = None


class GenerateInfo(msgspec.Struct, gc=False):
    id: str | None = None
    finish_reason: FinishReason | str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def reason(self) -> str | None:
        found = self.finish_reason
        return found.type if isinstance(found, FinishReason) else found

    @property
    def usage(self) -> WireUsage:
        return WireUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )


_NOTHING: Final = (b"", b"null", b'""', b"[]", b"{}", b"false")
_OBJECT_DECODER: Final = msgspec.json.Decoder(ErrorObject)
_ID: Final = re.compile(rb'"id"[ \t\r\n]*:[ \t\r\n]*"([A-Za-z0-9_.:-]{1,256})"')
_HEAD_BYTES: Final = 4_096
_MAX_ERROR_BYTES: Final = 65_536
"""No engine's error is longer."""

# Names of errors in the dialects, in lower case without separators, and the status that says the same.
_STATUS_BY_NAME: Final = {
    "badrequesterror": 400,
    "invalidrequesterror": 400,
    "contextlengthexceeded": 400,
    "validationerror": 400,
    "authenticationerror": 401,
    "permissionerror": 403,
    "notfounderror": 404,
    "modelnotfound": 404,
    "requesttoolarge": 413,
    "unprocessableentityerror": 422,
    "ratelimiterror": 429,
    "ratelimitexceeded": 429,
    "overloadederror": 503,
    "serviceunavailableerror": 503,
    "timeouterror": 504,
}

CHAT_DECODER: Final = msgspec.json.Decoder(ChatAnswer)
ANTHROPIC_DECODER: Final = msgspec.json.Decoder(AnthropicAnswer)
RESPONSES_DECODER: Final = msgspec.json.Decoder(ResponsesAnswer)
GENERATE_DECODER: Final = msgspec.json.Decoder(GenerateAnswer)

Observed = tuple[Usage, str | None, str | None]


def observe_json(api: Api, body: bytes) -> Observed:
    """Return (usage, finish reason, id) of a complete JSON answer; all unknown if it cannot be parsed."""
    try:
        if api is Api.MESSAGES:
            return _of_message(ANTHROPIC_DECODER.decode(body))
        if api is Api.RESPONSES:
            return _of_response(RESPONSES_DECODER.decode(body))
        if api is Api.GENERATE:
            return _of_generate(GENERATE_DECODER.decode(body))
        return _of_chat(CHAT_DECODER.decode(body))
    except (msgspec.DecodeError, RecursionError):
        return Usage(), None, None


def error_status(error: bytes) -> int | None:
    """Return the status that an error value inside a good answer stands for; None if it is no error.

    500 where it does not tell: engines put their own failures there, and the client's mistakes in a status.
    """
    if error in _NOTHING:
        return None
    try:
        found = _OBJECT_DECODER.decode(error)
    except (msgspec.DecodeError, RecursionError):
        return 500  # a text, or a list of them
    for value in (found.code, found.type):
        status = _status_of(bytes(value))
        if status is not None:
            return status
    return 500


def _status_of(value: bytes) -> int | None:
    digits = value.strip(b'"')
    if len(digits) == 3 and digits.isdigit() and digits >= b"400":
        return int(digits)
    name = digits.decode("utf-8", "replace").lower().replace("_", "").replace("-", "")
    return _STATUS_BY_NAME.get(name)


def error_in_json(body: bytes) -> int | None:
    """Return the status that a complete JSON answer stands for if it is an error and nothing else.

    Three forms: `{"error": {…}}` (OpenAI, and Anthropic with a `type`), and vLLM's older
    `{"object": "error", "message": …}`.
    """
    if len(body) > _MAX_ERROR_BYTES or b"error" not in body[:256]:
        return None
    try:
        found = _OBJECT_DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if bytes(found.object) == b'"error"' and bytes(found.error) in _NOTHING:
        return error_status(body)
    if bytes(found.object) not in (*_NOTHING, b'"error"'):
        return None  # an answer that has the field, such as a response of the Responses API
    return error_status(bytes(found.error))


def id_at_head(body: bytes) -> str | None:
    """Return the id of an answer that is too long to be read: engines put it at the beginning."""
    found = _ID.search(body, 0, _HEAD_BYTES)
    return None if found is None else found[1].decode()


def finish_reason_of(answer: ChatAnswer) -> str | None:
    """Return the reason of the first choice that has one."""
    for choice in answer.choices or ():
        if choice.finish_reason is not None:
            return choice.finish_reason
    return None


def _of_chat(answer: ChatAnswer) -> Observed:
    return _usage(answer.usage), finish_reason_of(answer), answer.id


def _of_message(answer: AnthropicAnswer) -> Observed:
    # count_tokens answers `{"input_tokens": n}` without a usage object, so nothing is reported
    return _usage(answer.usage), answer.stop_reason, answer.id


def _of_response(answer: ResponsesAnswer) -> Observed:
    return _usage(answer.usage), answer.status, answer.id


def _of_generate(answer: GenerateAnswer) -> Observed:
    info = answer.meta_info
    if info is None:
        return Usage(), None, None
    return _usage(info.usage), info.reason, info.id


def _usage(said: WireUsage | None) -> Usage:
    return Usage() if said is None else merge_usage(Usage(), said)
