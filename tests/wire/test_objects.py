"""The table of objects that engines keep: paths, names in bodies, ids in answers."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.wire.objects import (
    KINDS,
    MAX_NAMED,
    made_ids,
    may_name_files,
    named_files,
    named_objects,
    place_of,
)

IDS = st.text(alphabet="abcXYZ019_-", min_size=1, max_size=20)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_action_of_the_table_is_a_path(kind: Any) -> None:
    """With the id where it belongs; content and lists teach nothing."""
    for action, methods in kind.actions.items():
        place = place_of(f"{kind.path}/id-1{action.replace('*', 'id-2')}")
        assert place is not None
        assert (place.kind, place.object_id, place.action, place.methods) == (kind, "id-1", action, methods)
        assert place.learns("GET") == (action in kind.describing)
        assert not place.learns("DELETE")
    collection = place_of(kind.path)
    assert collection is not None
    assert (collection.is_collection, collection.learns("POST"), collection.learns("GET")) == (
        True,
        True,
        False,
    )
    assert place_of(f"{kind.path}/id-1/odd") is None


@given(file_id=IDS, spelled=st.lists(st.booleans(), min_size=7, max_size=7))
def test_a_file_is_found_however_its_name_is_spelled(file_id: str, spelled: list[bool]) -> None:
    """Each letter may be an escape, as a JSON parser reads it."""
    name = "".join(f"\\u{ord(c):04x}" if e else c for c, e in zip("file_id", spelled, strict=True))
    body = json.dumps({"messages": [{"content": [{"NAME": file_id}]}]}).replace("NAME", name).encode()
    assert may_name_files(body)
    assert named_files(body) == [file_id]


def test_files_are_found_by_the_start_given() -> None:
    """What lies before it is known; a name that begins before it does not matter."""
    body = b'{"file_id":"a"}' + b" " * 100 + b'{"file_id":"b"}'
    assert may_name_files(body, 20)
    assert not may_name_files(body, 120)
    assert not may_name_files(b'{"messages":[{"content":"caf\\u00e9 _ \\u003c"}]}')


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"content":[{"file_id":"f"}]}]',
        b"[]",
        b"\xff\xfe{",
        json.dumps({"input": json.loads("[" * 40 + '{"file_id":"f"}' + "]" * 40)}).encode(),
        json.dumps({"input": [{"file_id": f"f{number}"} for number in range(MAX_NAMED + 1)]}).encode(),
    ],
)
def test_what_cannot_be_read_is_refused(body: bytes) -> None:
    """Never taken for a body that names nothing."""
    with pytest.raises(BadRequest):
        named_files(body)


def test_halves_of_surrogate_pairs_do_not_hide_a_file() -> None:
    """Engines take them, so they are read."""
    assert named_files(b'{"messages":[{"content":[{"text":"\\ud83d"},{"file_id":"f"}]}]}') == ["f"]


def test_members_that_must_be_ids_must_be_text() -> None:
    """Another type is refused, an absent one is the engine's business."""
    batches = place_of("/v1/batches")
    assert batches is not None
    assert named_objects(batches, b'{"input_file_id":"f"}') == [("file", "f")]
    assert named_objects(batches, b'{"input_file_id":null}') == []
    with pytest.raises(BadRequest):
        named_objects(batches, b'{"input_file_id":["f"]}')


@given(body=st.binary(max_size=200) | st.text(max_size=50).map(str.encode))
def test_any_answer_gives_ids_or_none(body: bytes) -> None:
    """Whatever it is."""
    for kind in KINDS:
        assert isinstance(made_ids(kind, body), list)


def test_reading_ids_is_linear() -> None:
    """Twice the input costs no more than twice, with room for noise."""

    def cost_s(size: int) -> float:
        content = b'{"input":[' + b'{"_":"file_i\\\\u006"},' * size + b"{}]}"
        best = 1.0
        for _ in range(5):
            begin = time.perf_counter()
            may_name_files(content)
            best = min(best, time.perf_counter() - begin)
        return best

    assert cost_s(40_000) < 6 * cost_s(10_000) + 0.001
