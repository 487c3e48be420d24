"""Incremental text: pieces join to the whole, characters stay whole, stop strings never leak."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from fakes.tiny_checkpoint import write_tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.engine.text.detokenizer import REPLACEMENT, Detokenizer, StopStrings
from engine_adapter.engine.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = st.text(st.sampled_from("ab é日😀\n") | st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with one token per byte."""
    return load_tokenizer(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")), [])


def split(items: Sequence[int], cuts: list[int]) -> list[Sequence[int]]:
    bounds = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[start:end] for start, end in itertools.pairwise(bounds)]


@settings(max_examples=200)
@given(TEXTS, st.lists(st.integers(0, 200)))
def test_pieces_join_to_the_text_and_cut_no_character(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    """However the ids of a text are delivered, the pieces are whole characters and join to the text."""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(ids) for ids in split(tokenizer.encode(text), cuts)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 257), max_size=60), st.lists(st.integers(0, 60)))
def test_any_ids_join_to_their_decoding(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    """Also for broken UTF-8 and special tokens the pieces join to the decoded whole."""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(part) for part in split(ids, cuts)] + [detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_long_run_of_broken_bytes_is_not_held_for_ever(tokenizer: Tokenizer) -> None:
    """A model that emits only continuation bytes still produces output."""
    detokenizer = Detokenizer(tokenizer)
    broken = tokenizer.encode("é")[1:]
    assert "".join(detokenizer.push(broken) for _ in range(40))


def test_flush_is_final(tokenizer: Tokenizer) -> None:
    """A second flush brings nothing twice."""
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(tokenizer.encode("é")[:1])
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


@settings(max_examples=300)
@given(
    st.text("ab\n", max_size=25),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 25)),
)
def test_stop_strings_cut_alike_in_any_chunking(text: str, stops: list[str], cuts: list[int]) -> None:
    """The shown text ends where the stop string begins that is complete first; no chunking changes it."""
    watcher = StopStrings(stops)
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    shown = ""
    for start, end in itertools.pairwise(bounds):
        shown += watcher.push(text[start:end])
    shown += watcher.flush()
    hits = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert shown == (text[: min(hits)[1]] if hits else text)
    assert (watcher.matched is not None) == bool(hits)


def test_text_that_cannot_become_a_stop_string_is_not_held() -> None:
    """Only the possible start of a stop string waits; the rest goes out at once."""
    watcher = StopStrings(["<end>"])
    assert watcher.push("abc<e") == "abc"
    assert watcher.push("x") == "<ex"


@pytest.mark.parametrize(("include", "shown"), [(False, "a"), (True, "a###")])
def test_the_stop_string_itself_is_shown_only_on_request(include: bool, shown: str) -> None:
    """include_stop_str_in_output keeps the match; what follows it never shows."""
    watcher = StopStrings(["###"], include_stop=include)
    assert watcher.push("a##") + watcher.push("#tail") + watcher.push("more") + watcher.flush() == shown


def test_empty_stop_strings_are_ignored() -> None:
    """An empty stop string would end every text before it began."""
    watcher = StopStrings([""])
    assert watcher.push("abc") == "abc"
