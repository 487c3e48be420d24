"""What we read in a body is what engines read: our reading against those of the parsers that they use.

Engines read forms with Starlette and python-multipart, and JSON as Python's `json` does. Where we accept a
body, they find the same model and the same `stream`, or refuse the body.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from typing import Any, Final

import pytest
from fuzz.mutations import mutated
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import FormParser, MultiPartException, MultiPartParser

from gateway.errors import BadRequest
from gateway.values import Api
from gateway.wire.facts import FactsParser
from gateway.wire.forms import model_of_form
from gateway.wire.settings import KeySettings

NUM_EXAMPLES = int(os.environ.get("HOMING_FUZZ_EXAMPLES", "1500"))
bounded = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize="HOMING_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
PARSER: Final = FactsParser(KeySettings(), b"secret")
REFUSED: Final = "(refused)"


# -- forms


async def _pieces(body: bytes, num_bytes: int) -> AsyncGenerator[bytes]:
    for start in range(0, len(body), num_bytes):
        yield body[start : start + num_bytes]


def engine_reads(content_type: bytes, body: bytes, piece_bytes: int) -> list[Any]:
    """Every model that the engine's form parser finds; REFUSED if it raises."""
    headers = Headers(raw=[(b"content-type", content_type)])
    parser = MultiPartParser if b"multipart" in content_type.lower() else FormParser

    async def read() -> list[Any]:
        form = await parser(headers, _pieces(body, piece_bytes)).parse()
        await form.close()
        return form.getlist("model")

    try:
        return asyncio.run(read())
    except (MultiPartException, UnicodeError, ValueError, KeyError):
        return [REFUSED]


def check_form(content_type: bytes, body: bytes, piece_bytes: int) -> bool:
    """Whether we accept the form. Fails where the engine reads anything else in it."""
    try:
        ours = model_of_form([(b"content-type", content_type)], body)
    except BadRequest:
        return False
    theirs = engine_reads(content_type, body, piece_bytes)
    if theirs != [REFUSED]:
        assert theirs == ([] if ours is None else [ours])
    return True


NAME = st.sampled_from(
    [
        b'"model"',
        b"model",
        b'"file"',
        b'"Model"',
        b'"mod\\el"',
        b'"model',
        b'" model"',
        b'"x; name=model"',
        b"",
        b'"a\\"; name=\\"model"',
        b"mo%64el",
        b'"stream"',
        b'"\xc3\xa9"',
    ]
)
PARAMETER = st.sampled_from(
    [
        b'; filename="a.wav"',
        b"; filename*=utf-8''a",
        b"; name*=utf-8''model",
        b'; name="model"',
        b'; NAME="model"',
        b"; name*0=mo; name*1=del",
        b' ; x="; name=model"',
        b";",
        b"; charset=utf-7",
        b";\r\n name=model",
        b"\t",
    ]
)
LINE = st.sampled_from(
    [
        b"Content-Type: text/plain",
        b"Content-Type: text/plain; charset=utf-16",
        b"X: a\n\nb",
        b"X: a\rb",
        b" folded",
        b"Content-Transfer-Encoding: base64",
        b"Content-Transfer-Encoding: binary",
        b"X",
        b": x",
        b"X: " + b"y" * 8_200,
        b'Content-Disposition: form-data; name="file"',
        b"X-Y: z",
        b"",
        b"X :y",
        b"X:\0",
    ]
)
END = st.sampled_from([b"\r\n"] * 9 + [b"\n", b"\r", b"", b"\r\n\r\n", b" \r\n"])
VALUE = st.sampled_from(
    [
        b"allowed",
        b"forbidden",
        b"",
        b" x",
        b"x\r\n",
        b"\xff",
        "é".encode(),
        b"=66orbidden",
        b"--b",
        b"\r\n--b",
        b"\r\n--b--",
        b"\n--b\r\n",
        b"\r\n--bc\r\n",
        b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nx',
    ]
)
DELIMITER = st.sampled_from([b"--b"] * 12 + [b"--b ", b"--b\t", b"--c", b"-b", b"--bb", b"--b--"])
PART = st.builds(
    lambda delimiter, end, before, name, rest, after, value: (
        delimiter
        + end
        + b"".join(line + b"\r\n" for line in before)
        + b"Content-Disposition: form-data; name="
        + name
        + b"".join(rest)
        + b"\r\n"
        + b"".join(line + b"\r\n" for line in after)
        + b"\r\n"
        + value
        + end
    ),
    DELIMITER,
    END,
    st.lists(LINE, max_size=1),
    NAME,
    st.lists(PARAMETER, max_size=2),
    st.lists(LINE, max_size=1),
    VALUE,
)
FORM = st.builds(
    lambda before, parts, end: before + b"".join(parts) + end,
    st.sampled_from([b""] * 6 + [b"\r\n", b"preamble\r\n", b"{"]),
    st.lists(PART, min_size=1, max_size=4),
    st.sampled_from([b"--b--\r\n"] * 6 + [b"--b--", b"--b--x", b"", b"--b", b"--b\r\n", b"--b--\r\n--b\r\n"]),
)
TYPE = st.sampled_from(
    [b"multipart/form-data; boundary=b"] * 9
    + [
        b'Multipart/Form-Data;boundary="b"',
        b"multipart/form-data; boundary=b; charset=utf-16",
        b"multipart/form-data; boundary=c; boundary=b",
        b"multipart/form-data; x=1; boundary=b",
        b"multipart/form-data",
        b'multipart/form-data; x="; boundary=c"; boundary=b',
        b"multipart/form-data; charset=UTF-8; boundary=b",
        b"multipart/form-data; boundary*=utf-8''b",
        b"multipart/form-data; boundary=b;",
        b"multipart/form-data; boundary",
    ]
)
PLAIN: Final = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
TYPE_OF_B: Final = b"multipart/form-data; boundary=b"
LONG_HEAD: Final = b"--b\r\nX: " + b"y" * 9_000 + PLAIN[3:]


@bounded
@given(TYPE, FORM, st.sampled_from([1, 7, 1_000_000]))
@example(TYPE_OF_B, LONG_HEAD[:-7] + PLAIN, 1_000)
@example(TYPE_OF_B, PLAIN.replace(b'name="model"', b'name="x\ny"; name="model"'), 1_000)
def test_a_written_form(content_type: bytes, body: bytes, piece_bytes: int) -> None:
    """S01: parts written in every way that some parser forgives."""
    check_form(content_type, body, piece_bytes)


@bounded
@given(TYPE, mutated([PLAIN, PLAIN[:-7] + PLAIN, LONG_HEAD]), st.sampled_from([1, 1_000_000]))
def test_a_damaged_form(content_type: bytes, body: bytes, piece_bytes: int) -> None:
    """Bytes flipped, cut, doubled."""
    check_form(content_type, body, piece_bytes)


PAIRS: Final = b"application/x-www-form-urlencoded"


@bounded
@given(
    st.sampled_from([PAIRS, PAIRS + b"; charset=utf-16"]),
    st.lists(
        st.sampled_from(
            [
                b"model",
                b"mod%65l",
                b"=",
                b"&",
                b";",
                b"a",
                b"b",
                b"+",
                b"%",
                b"%ff",
                b"%C3%A9",
                b"\xe9",
                b"%00",
                b"%3D",
                b"{",
                b"\n",
            ]
        ),
        max_size=9,
    ).map(b"".join),
)
def test_a_form_of_pairs(content_type: bytes, body: bytes) -> None:
    """The same for plain HTML forms."""
    check_form(content_type, body, 3)


# -- JSON


def engine_json(body: bytes) -> Any:
    """What Python's parser makes of a body, as engines call it; REFUSED if it raises."""
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        return REFUSED
    return read if isinstance(read, dict) else REFUSED


def check_json(api: Api, body: bytes) -> bool:
    """Whether we accept the body. Fails where the engine reads another model, or another `stream`."""
    try:
        ours = PARSER.parse(api, [], body)
    except BadRequest:
        return False
    theirs = engine_json(body)
    if theirs != REFUSED:
        assert theirs.get("model") == ours.model
        assert bool(theirs.get("stream")) == ours.is_stream
        in_any_case = {name for name in theirs if name.lower() == "model"}  # what Go reads as the same name
        assert in_any_case <= {"model"}
    return True


MODEL_NAME = st.sampled_from(
    [
        b'"model"',
        b'"mod\\u0065l"',
        b'"Model"',
        b'"\\u004dodel"',
        b'"model "',
        b'"mod\\ud83del"',
        b'"model\\u0000"',
        b'"stream"',
        b'"str\\u0065am"',
        b'"Stream"',
        b'"x"',
        b'"messages"',
        b'"\xff"',
        b'"\\"model"',
        b'"model\\\\"',
    ]
)
JSON_VALUE = st.sampled_from(
    [
        b'"a"',
        b'"b"',
        b'"\\u0061"',
        b'"a\\ud83d"',
        b'"\\ud83d\\ude00"',
        b'"\\\\ud83d"',
        b"null",
        b"true",
        b"false",
        b"1",
        b"[]",
        b"{}",
        b'{"model":"b"}',
        b'["model"]',
        b'"\\",\\"model\\":\\"b"',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"a\0b"',
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"9" * 5_000,
        b"[" * 1_200 + b"]" * 1_200,
        b'"a\nb"',
        b'"\xef\xbf\xbd"',
        b'""',
    ]
)
MEMBER = st.builds(
    lambda blank, name, colon, value: blank + name + colon + value,
    st.sampled_from([b"", b" ", b"\n", b"\x0c", b"\xc2\xa0", b"//x\n"]),
    MODEL_NAME,
    st.sampled_from([b":"] * 8 + [b" : ", b"=", b""]),
    JSON_VALUE,
)
JSON_BODY = st.builds(
    lambda before, members, after: before + b",".join([b'"messages":[],"prompt":"x"', *members]) + after,
    st.sampled_from([b"{"] * 9 + [b" \n{", b"\xef\xbb\xbf{", b"\0{", b"[{", b"{{"]),
    st.lists(MEMBER, max_size=4),
    st.sampled_from([b"}"] * 9 + [b",}", b"} ", b"}\0", b"}x", b"}{}", b"", b"}}"]),
)
JSON_APIS = [api for api in Api if api not in (Api.MODELS, Api.OTHER, Api.AUDIO, Api.REALTIME)]


@bounded
@given(st.sampled_from(JSON_APIS), JSON_BODY)
def test_a_written_object(api: Api, body: bytes) -> None:
    """S01: members in every spelling and order."""
    check_json(api, body)


@bounded
@given(
    st.sampled_from(JSON_APIS),
    mutated(
        [b'{"model":"a","messages":[],"prompt":"x","stream":true}', b'{"mod\\u0065l":"a","messages":[]}']
    ),
)
def test_a_damaged_object(api: Api, body: bytes) -> None:
    """Bytes flipped, cut, doubled."""
    check_json(api, body)


@bounded
@given(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be", "utf-7"]))
def test_other_encodings_of_text(encoding: str) -> None:
    """Python detects UTF-16 and UTF-32; we take UTF-8 alone, so nothing is read that is not read the same."""
    body = json.dumps({"model": "a", "messages": []}).encode(encoding)
    assert check_json(Api.CHAT, body) is (encoding in ("utf-8", "utf-7"))  # the latter is ASCII here


def test_what_clients_send_is_accepted() -> None:
    """Else a parser that refuses everything would pass."""
    assert check_form(TYPE_OF_B, PLAIN, 5)
    assert check_form(PAIRS, b"model=a%2Fb&x=1", 5)
    for api in JSON_APIS:
        assert check_json(api, b'{"model":"a","messages":[],"prompt":"x","stream":true}')


@pytest.mark.parametrize("client", ["httpx", "requests", "aiohttp"])
def test_forms_of_client_libraries_are_accepted(client: str) -> None:
    """As they are written by real encoders, with odd file names."""
    for file_name in ("a.wav", "Ünï cödé.wav", "a;b.wav", "with 'quotes'.mp3"):
        content_type, body = ENCODERS[client](file_name)
        assert check_form(content_type, body, 1_000_000), (client, file_name, body)
        assert model_of_form([(b"content-type", content_type)], body) == "whisper-1"


def _by_httpx(file_name: str) -> tuple[bytes, bytes]:
    import httpx

    files = {"file": (file_name, b"RIFF\r\n--", "audio/wav")}
    request = httpx.Request("POST", "http://t/", data={"model": "whisper-1"}, files=files)
    return request.headers["content-type"].encode(), request.read()


def _by_requests(file_name: str) -> tuple[bytes, bytes]:
    import requests

    files = {"file": (file_name, b"RIFF\r\n--", "audio/wav")}
    request = requests.Request("POST", "http://t/", data={"model": "whisper-1"}, files=files).prepare()
    assert isinstance(request.body, bytes)
    return str(request.headers["content-type"]).encode(), request.body


def _by_aiohttp(file_name: str) -> tuple[bytes, bytes]:
    import aiohttp

    form = aiohttp.FormData({"model": "whisper-1"})
    form.add_field("file", b"RIFF\r\n--", filename=file_name, content_type="audio/wav")

    async def written() -> tuple[bytes, bytes]:
        payload = form()
        return payload.headers["content-type"].encode(), await payload.as_bytes()

    return asyncio.run(written())


ENCODERS: Final = {"httpx": _by_httpx, "requests": _by_requests, "aiohttp": _by_aiohttp}
