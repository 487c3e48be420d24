"""Reads the model from a form (RFC 7578, or `x-www-form-urlencoded`) without decoding the file in it.

The model decides what a tenant may use, so it must be the one that the engine reads. Form parsers differ in
what they forgive: line ends, folded headers, text around the parts, repeated fields, extended parameters,
charsets. So nothing is forgiven here: what is not written as common clients write it is refused with 400.

    --boundary CRLF  head CRLF CRLF content  CRLF--boundary CRLF  head CRLF CRLF content  CRLF--boundary--
    └─ delimiter ─┘  └────── part ────────┘  └── delimiter ────┘                          └─── the end ──┘

Costs one search for the delimiter, and the heads of the parts; contents are not copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import parse_qsl

from gateway.errors import BadRequest

_MAX_PARTS: Final = 1_000  # as in Starlette, which engines use
_MAX_PART_HEAD_BYTES: Final = 4_096
_MAX_MODEL_BYTES: Final = 512
_MAX_PAIRS_BYTES: Final = 65_536
_MULTIPART: Final = b"multipart/form-data"
_URLENCODED: Final = b"application/x-www-form-urlencoded"

_PARAMETER: Final = re.compile(
    rb"[ \t]*([A-Za-z-]+\*?)=(?:\"([^\"\\\x00-\x1f\x7f]*)\"|([^\x00-\x20\x7f\"\\;,]+))[ \t]*"
)
_BOUNDARY: Final = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_TEXT_TYPE: Final = re.compile(rb"text/plain(?:;[ \t]*charset=\"?(?:utf-8|us-ascii)\"?)?", re.IGNORECASE)
_PLAIN_TRANSFER: Final = (b"binary", b"8bit", b"7bit")

RawHeaders = Sequence[tuple[bytes, bytes]]


def media_type(raw_headers: RawHeaders) -> bytes:
    """Return the media type of a body in lower case, without parameters. Raises BadRequest if it has two."""
    types = [value for name, value in raw_headers if name.lower() == b"content-type"]
    if len(types) > 1:
        raise BadRequest("the request has more than one content-type", param="content-type")
    return types[0].partition(b";")[0].strip().lower() if types else b""


def model_of_form(raw_headers: RawHeaders, body: bytes) -> str | None:
    """Return the form's model, or None if it has none or the body is not a form.

    Raises BadRequest where form parsers could differ.
    """
    kind = media_type(raw_headers)
    if kind.startswith(_MULTIPART) and body:
        models = [_text(value) for value in _models(body, boundary_of(raw_headers))]
    elif kind == _URLENCODED and body:
        models = _models_of_pairs(body)
    else:
        return None
    if len(models) > 1:
        raise BadRequest("the form names the model more than once", param="model")
    return _checked(models[0]) if models else None


def is_multipart(raw_headers: RawHeaders) -> bool:
    """Whether the body is to be read as a multipart form, whatever it looks like. Raises BadRequest."""
    return media_type(raw_headers).startswith(_MULTIPART)


def boundary_of(raw_headers: RawHeaders) -> bytes:
    """Return the boundary of a multipart form. Raises BadRequest unless its content-type is plain."""
    (value,) = [value for name, value in raw_headers if name.lower() == b"content-type"]
    kind, _, rest = value.partition(b";")
    parameters = _parameters(rest)
    boundary = parameters.pop(b"boundary", b"")
    charset = parameters.pop(b"charset", b"utf-8").lower()
    if kind.strip().lower() != _MULTIPART or parameters or charset != b"utf-8":
        raise _ambiguous("its content-type has other parameters than a boundary")
    if not _BOUNDARY.fullmatch(boundary):
        raise BadRequest("the form has no valid boundary", param="content-type")
    return boundary


def _models(body: bytes, boundary: bytes) -> Iterator[bytes]:
    """Yield the content of every field `model`. O(len(body))."""
    delimiter = b"--" + boundary
    if not body.startswith(delimiter):
        raise _ambiguous("it does not begin with its boundary")
    start = len(delimiter)
    for _ in range(_MAX_PARTS):
        # body[start] follows a delimiter, body[end] is the first byte of the next one
        end = body.find(delimiter, start)
        if end < 0:
            if body[start : start + 5] not in (b"--", b"--\r\n"):
                raise _ambiguous("it has no end, or goes on behind it")
            return
        if not body.startswith(b"\r\n", start) or not body.startswith(b"\r\n", end - 2):
            raise _ambiguous("its boundary occurs within a line")
        head_end = body.find(b"\r\n\r\n", start, min(end, start + _MAX_PART_HEAD_BYTES))
        if head_end < 0 or head_end + 4 > end - 2:
            raise _ambiguous(f"a part has no head of at most {_MAX_PART_HEAD_BYTES} bytes")
        if _is_model(body[start + 2 : head_end]):
            yield body[head_end + 4 : end - 2]
        start = end + len(delimiter)
    raise BadRequest(f"the form has more than {_MAX_PARTS} parts")


def _is_model(head: bytes) -> bool:
    """Whether a part with this head is the field `model`. Raises BadRequest for a head that is not plain."""
    headers: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n"):
        found = _HEADER.fullmatch(line)
        if found is None or found[1].lower() in headers:
            raise _ambiguous("a line of a part's head is not a header, or a second one of its name")
        headers[found[1].lower()] = found[2].strip(b" \t")
    if headers.get(b"content-transfer-encoding", b"binary").lower() not in _PLAIN_TRANSFER:
        raise _ambiguous("a part has a content-transfer-encoding")
    parameters = _disposition(headers.get(b"content-disposition", b""))
    name = parameters[b"name"]
    if name.strip().lower() not in (b"model", b"_charset_"):
        return False
    is_text = _TEXT_TYPE.fullmatch(headers.get(b"content-type", b"text/plain"))
    if name != b"model" or b"filename" in parameters or not is_text:
        raise _ambiguous("the field `model` is not plain text, or the form names its charset")
    return True


def _disposition(value: bytes) -> dict[bytes, bytes]:
    """Return the parameters of a content-disposition, with a name."""
    kind, _, rest = value.partition(b";")
    parameters = _parameters(rest)
    is_extended = parameters.pop(b"filename*", None) is not None  # beside `filename`, which all can read
    known = parameters.keys() <= {b"name", b"filename"}
    if kind.strip().lower() != b"form-data" or not known or b"name" not in parameters:
        raise _ambiguous("a part's content-disposition has no name, or other parameters")
    if is_extended and b"filename" not in parameters:
        raise _ambiguous("a part gives its filename in extended form only")
    if any(b"name=" in text.lower().replace(b" ", b"") for text in parameters.values()):
        raise _ambiguous("a name in the form looks like a parameter")
    return parameters


def _parameters(text: bytes) -> dict[bytes, bytes]:
    """Return `name=value; other="value"` by lower-case name. Raises BadRequest unless each is plain, and
    there once."""
    found: dict[bytes, bytes] = {}
    start = 0
    while start < len(text):
        match = _PARAMETER.match(text, start)
        if (
            match is None
            or match[1].lower() in found
            or text[match.end() : match.end() + 1] not in (b"", b";")
        ):
            raise _ambiguous("a header has a parameter that is not plain, or twice")
        found[match[1].lower()] = match[3] if match[2] is None else match[2]
        start = match.end() + 1
    return found


def _models_of_pairs(body: bytes) -> list[str]:
    """Return the models in `name=value&…`. Some parsers also divide at semicolons."""
    if len(body) > _MAX_PAIRS_BYTES:
        raise BadRequest(f"the form has more than {_MAX_PAIRS_BYTES} bytes: send it as multipart/form-data")
    if not body.isascii() or b";" in body:
        raise _ambiguous("it has bytes that are not escaped")
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_PARTS)
    except ValueError as error:
        raise BadRequest(f"the form has more than {_MAX_PARTS} fields") from error
    return [value for name, value in pairs if name == "model"]


def _text(value: bytes) -> str:
    return value[: _MAX_MODEL_BYTES + 1].decode("utf-8", "replace")


def _checked(model: str) -> str:
    if len(model) > _MAX_MODEL_BYTES:
        raise BadRequest(f"the field `model` is longer than {_MAX_MODEL_BYTES} characters", param="model")
    if "\ufffd" in model:
        raise BadRequest("the field `model` is not UTF-8", param="model")
    if not model.strip():
        raise BadRequest("the field `model` is empty", param="model")
    return model


def _ambiguous(why: str) -> BadRequest:
    return BadRequest(f"the form could be read in two ways: {why}")
