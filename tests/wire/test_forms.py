"""Multipart forms: their model is the one that an engine reads, however the form is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.values import Api, KeySource, RequestFacts
from gateway.wire.forms import model_of_form

FORM = [(b"Content-Type", b'multipart/form-data; boundary="b"')]
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\n'
FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'


def form(*parts: bytes) -> bytes:
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + b"--b--\r\n"


def test_audio_uploads_are_routed_by_their_model(parse: Callable[..., RequestFacts]) -> None:
    """Without being decoded; the same API also takes JSON."""
    headers = {"x-session-id": "s", "content-type": "multipart/form-data; boundary=b"}
    facts = parse(form(FILE + b"RIFF\x00\xff", MODEL + b"whisper-1"), headers, api=Api.AUDIO)
    assert (facts.model, facts.key_source, facts.sets_binding) == ("whisper-1", KeySource.HEADER, False)
    assert parse(b"--b--", headers, api=Api.AUDIO).model is None
    assert parse({"model": "tts-1", "input": "x"}, api=Api.AUDIO).model == "tts-1"


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (form(FILE + b"x\r\n" + MODEL + b"small\r\n", MODEL + b"large"), "large"),
        (form(FILE + b"x\n--b\r", MODEL + b"x").replace(b"\n--b\r\r", b"\n--c\r\r"), "x"),
        (form(MODEL.replace(b'"model"', b"model") + b"x"), "x"),
        (form(MODEL.lower().replace(b'form-data; name="model"', b'Form-Data;name="model" ') + b"x"), "x"),
        (form(b"X-First: 1\r\n" + MODEL + b"x"), "x"),
        (form(b"Content-Type: text/plain; charset=utf-8\r\n" + MODEL + b"x"), "x"),
        (form(b"Content-Transfer-Encoding: binary\r\n" + MODEL + b"x"), "x"),
        (form(FILE.replace(b"\r\n", b"; filename*=utf-8''a.wav\r\n", 1) + b"x", MODEL + b"x"), "x"),
        (form(MODEL + b" x\r\n"), " x\r\n"),
        (form(MODEL + "mödel".encode()), "mödel"),
        (form(FILE + b"x"), None),
        (form(MODEL + b"x")[:-2], "x"),
        (b"--b--", None),
        (b"", None),
    ],
)
def test_a_field_is_what_stands_between_delimiters(body: bytes, model: str | None) -> None:
    """As common clients write it. Bytes of a file that look like a field are none."""
    assert model_of_form(FORM, body) == model


BOTH = (MODEL + b"allowed", MODEL + b"forbidden")


@pytest.mark.parametrize(
    "body",
    [
        form(*BOTH),
        form(MODEL + b"same", MODEL + b"same"),
        form(MODEL.replace(b"name=", b"name*=utf-8''") + b"x"),
        form(MODEL.replace(b"name=", b'name="file"; name=') + b"x"),
        form(MODEL.replace(b"name=", b'filename="a; name=file"; name=') + b"x"),
        form(MODEL.replace(b"name=", b"name*0=mod; name*1=el; name=") + b"x"),
        form(MODEL.replace(b"model", b"mo\\del") + b"x"),
        form(MODEL.replace(b"model", b"Model") + b"x"),
        form(MODEL.replace(b"model", b" model") + b"x"),
        form(MODEL.replace(b"form-data", b"attachment") + b"x"),
        form(MODEL.replace(b"; name", b";\r\n name") + b"x"),
        form(MODEL.replace(b"; name", b";\n name") + b"x"),
        form(MODEL.replace(b'"model"', b'"mo\ndel"') + b"x"),
        form(MODEL.replace(b'"model"', b'"model"; filename="a"') + b"x"),
        form(MODEL.replace(b'"model"', b"\"file\"; filename*=utf-8''a") + b"x"),
        form(MODEL[:-2] + MODEL.replace(b"model", b"file") + b"x"),
        form(b"X: a\n\nb\r\n" + MODEL + b"x"),
        form(b"X: a\rb\r\n" + MODEL + b"x"),
        form(b"X : a\r\n" + MODEL + b"x"),
        form(b"X\r\n" + MODEL + b"x"),
        form(b"X: " + b"x" * 9_000 + b"\r\n" + MODEL + b"forbidden", MODEL + b"allowed"),
        form(b"Content-Transfer-Encoding: quoted-printable\r\n" + MODEL + b"=66"),
        form(b"Content-Transfer-Encoding: base64\r\n" + MODEL + b"eA=="),
        form(b"Content-Type: text/plain; charset=utf-16\r\n" + MODEL + b"x"),
        form(b"Content-Type: application/json\r\n" + MODEL + b'"x"'),
        form(MODEL.replace(b"model", b"_charset_") + b"utf-7", MODEL + b"x"),
        form(FILE + b"x\r\n--bogus\r\n" + MODEL + b"small"),
        form(FILE + b"x\n--b\n" + MODEL + b"small"),
        form(FILE + b"x--b\r\n" + MODEL + b"small"),
        form(b"no head"),
        form(b"\r\nno name"),
        b"preamble\r\n" + form(MODEL + b"x"),
        b"\r\n" + form(MODEL + b"x"),
        form(MODEL + b"x") + b"epilogue",
        form(FILE + b"x") + b"--b\r\n" + MODEL + b"behind the end\r\n--b--\r\n",
        form(MODEL + b"x")[:-4],
        form(MODEL + b"x")[:-12],
        form(MODEL + b"x" * 513),
        form(MODEL + b"\xff"),
        form(MODEL),
        form(MODEL + b"  "),
        form(*[FILE] * 1001),
        b"RIFF",
    ],
)
def test_what_two_readers_could_understand_in_two_ways_is_refused(body: bytes) -> None:
    """S01: a tenant must not be judged by one model and served by another."""
    with pytest.raises(BadRequest):
        model_of_form(FORM, body)


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=b; boundary=c",
        b"multipart/form-data; boundary=b; charset=utf-16",
        b'multipart/form-data; x="; boundary=c"; boundary=b',
        b"multipart/form-data; boundary*=utf-8''b",
        b'multipart/form-data; boundary="b "',
        b'multipart/form-data; boundary="b\\""',
        b"multipart/form-data; boundary=" + b"b" * 71,
        b"multipart/form-data, text/plain; boundary=b",
        b"multipart/form-datax; boundary=b",
    ],
)
def test_a_boundary_is_plain(content_type: bytes) -> None:
    """S01: a form is divided in one way only."""
    with pytest.raises(BadRequest):
        model_of_form([(b"content-type", content_type)], form(MODEL + b"x"))


@pytest.mark.parametrize(
    "headers", [[], [(b"content-type", b"audio/wav")], [(b"content-type", b"multipart/mixed; boundary=b")]]
)
def test_without_its_type_there_is_no_form(headers: list[tuple[bytes, bytes]]) -> None:
    """Then no model is named, which a tenant with a list of models may not use. Two types are refused."""
    assert model_of_form(headers, form(MODEL + b"x")) is None
    with pytest.raises(BadRequest):
        model_of_form(FORM * 2, form(MODEL + b"x"))


def test_a_form_of_pairs_has_one_model_too(parse: Callable[..., RequestFacts]) -> None:
    """The type of plain HTML forms; `curl -d` sends it with JSON, too, but not both at once."""
    pairs = [(b"content-type", b"application/x-www-form-urlencoded")]
    assert model_of_form(pairs, b"a=1&model=org%2Fx+y&b=") == "org/x y"
    assert model_of_form(pairs, b"a=1") is None
    two_ways = (b"model=a&mod%65l=b", b"x=1;model=b", b"model=\xff", b"model=%ff", b"model=")
    for body in (*two_ways, b"model=a&" * 2_000):
        with pytest.raises(BadRequest):
            model_of_form(pairs, body)
    header = {"content-type": "application/x-www-form-urlencoded"}
    assert parse(b'{"model":"m","input":"x"}', header, api=Api.AUDIO).model == "m"
    with pytest.raises(BadRequest):
        parse(b'{"x":"&model=forbidden&","model":"m"}', header, api=Api.AUDIO)
    with pytest.raises(BadRequest):
        parse(b'{"model":"m"}\r\n' + form(MODEL + b"x"), {"content-type": FORM[0][1].decode()}, api=Api.AUDIO)


@pytest.mark.parametrize(
    ("body", "content_type", "model"),
    [
        (b'{"model":"m","prompt":"x"}', "application/json", "m"),
        (b'{"model":"m","prompt":"x"}', None, "m"),
        (b'{"model":"m","model":"x"}', None, None),
        (b'{"model":"m"', "application/json", None),
        (b"[]", "application/json", None),
        (form(MODEL + b"m"), FORM[0][1].decode(), "m"),
        (form(*BOTH), FORM[0][1].decode(), None),
        (b"model=m", "application/x-www-form-urlencoded", "m"),
        (b"\x00\xff", "application/octet-stream", None),
        (b"", None, None),
    ],
)
def test_a_passed_through_body_may_name_a_model(
    parse: Callable[..., RequestFacts], body: bytes, content_type: str | None, model: str | None
) -> None:
    """N22: JSON or form; anything else, and what could be read in two ways, names none."""
    headers = {"x-session-id": "s"} | ({} if content_type is None else {"content-type": content_type})
    facts = parse(body, headers, api=Api.OTHER)
    assert (facts.model, facts.key_source) == (model, KeySource.HEADER)


@given(body=st.binary(max_size=300), value=st.binary(max_size=60))
def test_any_bytes_give_a_model_or_an_error_of_the_clients(body: bytes, value: bytes) -> None:
    """Nothing else is raised, whatever comes."""
    for headers, data in ((FORM, body), (FORM, form(MODEL + body)), ([(b"content-type", value)], body)):
        with contextlib.suppress(BadRequest):
            assert isinstance(model_of_form(headers, data), str | None)
