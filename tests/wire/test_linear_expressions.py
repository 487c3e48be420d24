"""No regular expression takes more than linear time, whatever text it is given.

Every compiled expression of our modules is found by itself, so a new one is tested too. Each is fed repeated
pieces of what it looks for, alone, in pairs, and with an end that spoils the match: where two repetitions in
it can share text, one of these makes it try all ways to divide it. Used with `match` and `fullmatch` alone it
is tried at the beginning of a text, else everywhere.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # the grammar of an expression, to know its letters
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.values import Api
from gateway.wire.facts import FactsParser
from gateway.wire.keys import session_part
from gateway.wire.normalise import without_cache_control
from gateway.wire.settings import KeySettings

ROOT = Path(__file__).parents[2]
SHORT, LONG = 4_000, 32_000
Hostile = tuple[str, str, str]
SUSPICIOUS_S = 0.004
"""A linear search of a short text takes at most a tenth of this, a quadratic one five times as long."""

OF_OPERATORS = {
    "gateway/wire/settings.py": "checks that an operator's expression compiles",
    "gateway/wire/normalise.py": "operators' expressions: at most the first and last 64 Ki characters",
    "gateway/wire/prompts.py": "an operator's texts, escaped: beginnings of lines",
    "gateway/wire/keys.py": "an operator's expression, over values of at most max_key_length bytes",
}
"""Files that compile expressions while they run, and why that is no danger."""


def modules() -> Iterator[tuple[Path, str]]:
    """All but the commands, which read what their user writes."""
    for folder in ("gateway", "engine_adapter"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(ROOT / "gateway" / "commands"):
                continue
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield path, name


def expressions() -> dict[str, re.Pattern[Any]]:
    """All compiled expressions at module level, also in dictionaries and tuples, by place."""
    found: dict[str, re.Pattern[Any]] = {}
    for path, name in modules():
        if "re.compile" not in path.read_text(encoding="utf-8"):
            continue
        for attribute, value in vars(importlib.import_module(name)).items():
            values = value.values() if isinstance(value, dict) else value
            for number, one in enumerate(values if isinstance(values, tuple | list) else [values]):
                if isinstance(one, re.Pattern):
                    found.setdefault(f"{name}.{attribute}.{number}", one)
            if isinstance(value, dict):
                for key, one in value.items():
                    if isinstance(one, re.Pattern):
                        found.setdefault(f"{name}.{attribute}.{key}", one)
    return found


EXPRESSIONS = expressions()
SOURCES = {name: path.read_text(encoding="utf-8") for path, name in modules()}


def is_searched(place: str) -> bool:
    """Whether an expression looks for its text anywhere; also where how it is used cannot be told."""
    module, name, _ = place.rsplit(".", 2)
    source = "".join(
        text for own, text in SOURCES.items() if own == module or f"from {module} import" in text
    )
    uses = re.findall(rf"\b{name}\b(?:\[[^]]*\])?(?:\.([a-z]+)\()?", source)
    declared = len(re.findall(rf"^{name}(?:: Final[^=]*)? = ", source, re.MULTILINE))
    imported = len(
        re.findall(rf"^(?:from [^\n]*import|    )[^=()\n]*\b{name}\b,?[^=()\n]*$", source, re.MULTILINE)
    )
    anchored = sum(use in ("match", "fullmatch") for use in uses)
    return anchored < len(uses) - declared - imported


def letters(tree: Any) -> Iterator[str]:
    """One letter of each literal, and one or two of each class, in the order of the expression."""
    for operation, argument in tree:
        kind = str(operation)
        if kind == "LITERAL":
            yield chr(argument)
        elif kind == "NOT_LITERAL":
            yield "x" if chr(argument) != "x" else "y"
        elif kind == "ANY":
            yield "x"
        elif kind == "IN":
            yield from _of_class(argument)
        elif kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            yield from letters(argument[2])
        elif kind == "SUBPATTERN":
            yield from letters(argument[3])
        elif kind == "BRANCH":
            for branch in argument[1]:
                yield from letters(branch)
        elif kind in ("ASSERT", "ASSERT_NOT"):
            yield from letters(argument[1])


def _of_class(items: Any) -> Iterator[str]:
    if str(items[0][0]) == "NEGATE":
        excluded = re.compile(f"[{re.escape(''.join(_of_class(items[1:])))}]")
        yield from [char for char in 'x 0"a\\' if not excluded.match(char)][:2]
        return
    for operation, argument in items[:4]:
        kind = str(operation)
        if kind == "LITERAL":
            yield chr(argument)
        elif kind == "RANGE":
            yield chr(argument[0])
        elif kind == "CATEGORY":
            yield {"CATEGORY_SPACE": " ", "CATEGORY_DIGIT": "0"}.get(str(argument), "x")


def words(tree: Any) -> Iterator[str]:
    """The runs of literals in the expression: what a search looks for first."""
    run = ""
    for operation, argument in tree:
        if str(operation) == "LITERAL":
            run += chr(argument)
            continue
        if run:
            yield run
        run = ""
        if str(operation) in ("MAX_REPEAT", "MIN_REPEAT"):
            yield from words(argument[2])
        elif str(operation) == "SUBPATTERN":
            yield from words(argument[3])
    if run:
        yield run


def hostile(pattern: re.Pattern[Any]) -> Iterator[Hostile]:
    """(start, what is repeated, end)."""
    text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    tree = _parser.parse(
        text, pattern.flags & ~re.UNICODE & ~re.DEBUG if isinstance(pattern.pattern, bytes) else 0
    )
    singles = list(dict.fromkeys([*letters(tree), " ", "0", "a"]))[:14]
    runs = [word for word in dict.fromkeys(words(tree)) if len(word) > 1][:4]
    skeleton = "".join(letters(tree))[:40]
    units = [*singles, *runs, skeleton, *["".join(pair) for pair in itertools.permutations(singles[:8], 2)]]
    units += [run + single for run in runs for single in singles]
    for unit in units:
        for start in ("", *runs[:2]):
            for end in "\0", " ":
                yield start, unit, end


def seconds(pattern: re.Pattern[Any], hostile_text: Hostile, length: int, *, searches: bool) -> float:
    """CPU time of all matches in a text of this length, the best of three if it is suspicious."""
    start, unit, end = hostile_text
    text: Any = start + unit * (length // len(unit)) + end
    if isinstance(pattern.pattern, bytes):
        text = text.encode("latin-1", "replace")
    best = float("inf")
    for _ in range(3):
        began_s = time.thread_time()
        pattern.fullmatch(text)
        pattern.match(text)
        for _ in pattern.finditer(text) if searches else ():
            pass
        best = min(best, time.thread_time() - began_s)
        if best < SUSPICIOUS_S:
            break
    return best


def is_linear(pattern: re.Pattern[Any], hostile_text: Hostile, *, searches: bool = True) -> bool:
    short_s = seconds(pattern, hostile_text, SHORT, searches=searches)
    if short_s < SUSPICIOUS_S:
        return True
    return seconds(pattern, hostile_text, LONG, searches=searches) < 3 * short_s * LONG / SHORT


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_an_expression_is_linear(place: str) -> None:
    """S02: eight times the text takes about eight times as long, never sixty-four times."""
    pattern, searches = EXPRESSIONS[place], is_searched(place)
    assert [text for text in hostile(pattern) if not is_linear(pattern, text, searches=searches)] == []


@pytest.mark.parametrize("pattern", [r',?\s*"cache_control"', r"_session_([^\s]+)\Z", r"\s*,\s*\Z"])
def test_the_measure_finds_what_is_not(pattern: str) -> None:
    """Also those that were here once."""
    compiled = re.compile(pattern)
    assert not all(is_linear(compiled, text) for text in hostile(compiled))


def test_no_other_file_compiles_expressions_while_it_runs() -> None:
    """Else they would not be tested above. Names of groups and the like come from us; texts do not."""
    found = set()
    for path, _ in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inner = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in itertools.chain.from_iterable(map(ast.walk, inner)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "re" and node.func.attr == "compile":
                    found.add(str(path.relative_to(ROOT)))
    assert found == set(OF_OPERATORS)


# -- what stands around them


def doubled(act: Callable[[int], object]) -> None:
    """Fail if eight times as much takes more than twenty-four times as long."""

    def best_s(size: int) -> float:
        times = []
        for _ in range(3):
            began_s = time.thread_time()
            act(size)
            times.append(time.thread_time() - began_s)
        return min(times)

    short_s = max(best_s(40_000), 0.002)
    assert best_s(320_000) < 24 * short_s


@pytest.mark.parametrize(
    "unit", [b" ", b'"cache_control"', b'"cache_control":', b'"cache_control":{', b', "cache_control" ']
)
def test_cache_markers_are_removed_in_linear_time(unit: bytes) -> None:
    """S02: 80 KB of blanks held the loop for seconds."""
    doubled(lambda size: without_cache_control(b'"cache_control"' + unit * (size // len(unit))))


@pytest.mark.parametrize("unit", ["_session_", "_", "_session_a ", "{", " "])
def test_the_session_part_is_found_in_linear_time(unit: str) -> None:
    """S02: so did `user_id`."""
    doubled(lambda size: session_part(json.dumps("user_" + unit * (size // len(unit)) + " ").encode()))


TEXTS = [
    " ",
    "_session_",
    '\\"cache_control\\":',
    "2026-11-2",
    "1:00",
    "{",
    "\\\\ud83d",
    "\\ud83d",
    "a ",
    "00:",
    "\\t",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES, Api.RESPONSES, Api.GENERATE])
def test_bodies_are_read_in_linear_time(api: Api, text: str) -> None:
    """S02: wherever a client may put the text."""
    parser = FactsParser(KeySettings(), b"secret")

    def act(size: int) -> None:
        long = text * (size // len(text))
        blank = " " * size
        content = f'[{{"type":"text","text":"{long}",{blank}"cache_control":{{"type":"x"}}}}]'
        system, user = (
            f'{{"role":"system","content":"{long}"}}',
            f'{{"role":"user",{blank}"content":{content}}}',
        )
        body = (
            f'{{"model":"m","system":"{long}","instructions":"{long}","text":"{long}","user":"{long}",'
            f'"metadata":{{"user_id":"x{long}"}},'
            f'"tools":[{{"name":"{long}" , "cache_control" {blank}: null}}],'
            f'"input":[{user}],"messages":[{system},{user}]}}'
        ).encode()
        try:
            parser.parse(api, [(b"cookie", long[:8_000].encode())], body)
        except GatewayError as error:
            assert error.status == 400  # noqa: PT017 (either way is right, if it is fast)

    doubled(act)
