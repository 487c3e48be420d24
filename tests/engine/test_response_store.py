"""What `/v1/responses` keeps: bounded, least recently used first out."""

from __future__ import annotations

from engine_adapter.server.response_store import ResponseStore, StoredResponse


def entry(name: str) -> StoredResponse:
    return StoredResponse(document={"id": name}, messages=())


def test_the_least_recently_used_answer_goes_first() -> None:
    """Reading an answer keeps it; at the bound the one not read longest is dropped."""
    store = ResponseStore(capacity=2)
    store.put("a", entry("a"))
    store.put("b", entry("b"))
    assert store.get("a") is not None
    store.put("c", entry("c"))
    assert store.get("b") is None
    assert store.get("a") == entry("a")
    assert store.get("c") == entry("c")


def test_deleting_tells_whether_it_was_there() -> None:
    """A second delete finds nothing."""
    store = ResponseStore()
    store.put("a", entry("a"))
    assert store.delete("a")
    assert not store.delete("a")
    assert store.get("a") is None
