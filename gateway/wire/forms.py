"""Reads the model from a multipart form (RFC 7578) without decoding the file in it.

The form is split at its delimiters, as engines split it, so bytes inside a file that look like a field do not
count. A form whose model could be read in two ways is refused: the model decides what a tenant may use, so it
must be the one that the engine reads. Costs one search for the delimiter and the heads of the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Final

from gateway.errors import BadRequest

_MAX_PARTS: Final = 1_000  # as in Starlette, which engines use
_MAX_PART_HEAD_BYTES: Final = 8_192
_MAX_MODEL_BYTES: Final = 512

RawHeaders = Sequence[tuple[bytes, bytes]]


def model_of_form(raw_headers: RawHeaders, body: bytes) -> str | None:
    """Return the form's model, or None if it has none or the body is not a form. Raises BadRequest."""
    boundary = _boundary(raw_headers)
    models = set() if boundary is None else set(_models(body, boundary.encode("latin-1", "replace")))
    if len(models) > 1:
        raise BadRequest("the form names more than one model", param="model")
    return models.pop() if models else None


def _boundary(raw_headers: RawHeaders) -> str | None:
    types = [value for name, value in raw_headers if name.lower() == b"content-type"]
    if len(types) != 1:
        return None
    return _only_value(types[0].decode("latin-1"), "boundary")


def _models(body: bytes, boundary: bytes) -> Iterator[str]:
    """Yield every value of a field `model`. Stops at the end of a truncated form."""
    dashes = b"--" + boundary
    start = 0 if body.startswith(dashes) else body.find(b"\r\n" + dashes) + 2
    for _ in range(_MAX_PARTS):
        line_end = body.find(b"\r\n", start)
        # body[start:line_end] is the delimiter's line, body[line_end + 2 : end] the part's head and content
        if line_end < 0 or not body.startswith(dashes, start) or body.startswith(b"--", start + len(dashes)):
            return
        if body[start + len(dashes) : line_end].strip(b" \t"):
            raise BadRequest("the form is ambiguous: a delimiter line continues after the boundary")
        end = body.find(b"\r\n" + dashes, line_end)
        head_end = body.find(b"\r\n\r\n", line_end, line_end + _MAX_PART_HEAD_BYTES)
        if 0 <= head_end < end and _name(body[line_end + 2 : head_end + 4]) == "model":
            yield _text(body[head_end + 4 : end])
        start = end + 2
    raise BadRequest(f"the form has more than {_MAX_PARTS} parts")


def _name(head: bytes) -> str | None:
    """Return the field name of a part. Raises BadRequest if the part is named twice."""
    found = BytesHeaderParser().parsebytes(head).get_all("content-disposition", [])
    if len(found) > 1:
        raise BadRequest("a part of the form has two content-disposition headers")
    return _only_value(str(found[0]), "name") if found else None


def _only_value(header: str, wanted: str) -> str | None:
    """Return one parameter of a header. Raises BadRequest if it occurs twice or uses RFC 2231."""
    message = Message()
    message["x"] = header.replace("\r", " ").replace("\n", " ")
    found = [value for name, value in message.get_params([], "x")[1:] if name.lower() == wanted]
    if len(found) > 1 or any(not isinstance(value, str) for value in found):
        raise BadRequest(f"the form is ambiguous: a header gives its {wanted} twice or in an extended form")
    return found[0] if found else None


def _text(value: bytes) -> str:
    if len(value) > _MAX_MODEL_BYTES:
        raise BadRequest(f"the field `model` is longer than {_MAX_MODEL_BYTES} bytes", param="model")
    return value.decode("utf-8", "replace")
