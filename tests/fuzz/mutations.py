"""Mutations of a corpus: near misses find more than random bytes, which most parsers refuse at once."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"
# what parsers stumble over: ends of strings and lines, escapes, half a surrogate pair, large numbers, depth
TOKENS = (
    *(
        b"\0",
        b"\n",
        b"\r\n",
        b"\r",
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b",",
        b" ",
        b"\xff",
        b"\xed\xa0\x80",
    ),
    *(
        b"null",
        b"true",
        b"-1",
        b"1e999",
        b"NaN",
        b"\\ud800",
        b"data:",
        b"[DONE]",
        b"<<: *a",
        b"&a ",
        b"!!python/name:os",
    ),
    *(b"9" * 40, b"[" * 500, b"{" * 200, b'{"a":' * 300, b"\xef\xbb\xbf"),
)


def corpus(name: str) -> list[bytes]:
    """All files of one folder of the corpus, in a stable order."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """One seed after up to eight mutations. O(len(seed)) each."""

    def mutate(data: bytes, _number: int) -> bytes:
        kind = draw(st.sampled_from(("flip", "cut", "double", "insert", "splice")))
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 64)))
        if kind == "flip":
            return (
                data[:start]
                + bytes(byte ^ (1 << draw(st.integers(0, 7))) for byte in data[start : start + 1])
                + data[start + 1 :]
            )
        if kind == "cut":
            return data[:start] + data[end:]
        if kind == "double":
            return data[:end] + data[start:end] + data[end:]
        if kind == "insert":
            return data[:start] + draw(st.sampled_from(TOKENS)) + data[start:]
        other = draw(st.sampled_from(seeds))
        return data[:start] + other[draw(st.integers(0, len(other))) :]

    return reduce(mutate, range(draw(st.integers(0, 8))), draw(st.sampled_from(seeds)))
