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
        (form(MODEL + b"same", MODEL + b"same"), "same"),
        (form(MODEL.replace(b'"model"', b"model") + b"x"), "x"),
        (form(MODEL.lower().replace(b"; name", b";\r\n name") + b"x"), "x"),
        (form(b"X-First: 1\r\n" + MODEL + b"x"), "x"),
        (b"preamble\r\n" + form(MODEL + b"x"), "x"),
        (form(FILE + b"x") + b"--b\r\n" + MODEL + b"behind the end\r\n--b--\r\n", None),
        (form(MODEL + b"x")[:-12], None),
        (b"--b--", None),
        (b"", None),
        (b"RIFF", None),
    ],
)
def test_a_field_is_what_stands_between_delimiters(body: bytes, model: str | None) -> None:
    """Bytes of a file that look like a field are none, nor is anything behind the end."""
    assert model_of_form(FORM, body) == model


@pytest.mark.parametrize(
    "body",
    [
        form(MODEL + b"one", MODEL + b"other"),
        form(MODEL.replace(b"name=", b"name*=utf-8''") + b"x"),
        form(MODEL.replace(b"name=", b'name="file"; name=') + b"x"),
        form(MODEL[:-2] + MODEL.replace(b"model", b"file") + b"x"),
        form(FILE + b"x\r\n--bogus\r\n" + MODEL + b"small"),
        form(MODEL + b"x" * 513),
        form(*[FILE] * 1001),
    ],
)
def test_what_two_readers_could_understand_in_two_ways_is_refused(body: bytes) -> None:
    """A tenant must not be judged by one model and served by another."""
    with pytest.raises(BadRequest):
        model_of_form(FORM, body)


@pytest.mark.parametrize("headers", [[], FORM * 2, [(b"content-type", b"audio/wav")]])
def test_without_one_boundary_there_is_no_form(headers: list[tuple[bytes, bytes]]) -> None:
    """Then no model is named, which a tenant with a list of models may not use."""
    assert model_of_form(headers, form(MODEL + b"x")) is None


@given(body=st.binary(max_size=300), value=st.binary(max_size=60))
def test_any_bytes_give_a_model_or_an_error_of_the_clients(body: bytes, value: bytes) -> None:
    """Nothing else is raised, whatever comes."""
    for headers, data in ((FORM, body), (FORM, form(MODEL + body)), ([(b"content-type", value)], body)):
        with contextlib.suppress(BadRequest):
            assert isinstance(model_of_form(headers, data), str | None)
