"""Writes `docs/configuration.md` from the configuration's own types: names, types, defaults and their words.

    python docs/write_reference.py            write the page
    python docs/write_reference.py --check    exit 1 when the page is not what would be written

The words are the docstrings beside the options in the code that obeys them, so page and code cannot part.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gateway.config.config import Config

PAGE = Path(__file__).with_name("configuration.md")

_INTRODUCTION = """\
# Configuration

One YAML file, given with `homing gateway --config FILE`. Every option has a default that suits one machine,
so an empty file is a valid one. Unknown keys, duplicate keys and impossible values are refused at start with
their path; `homing gateway --config FILE --check` prints the file with all defaults filled in. Units end the
names: `_s` is seconds, `_bytes` bytes. This page is written from the code by `make docs`.
"""


def option_texts(section: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring below each field of a struct, by field name; those of its bases included."""
    texts: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if not (isinstance(owner, type) and issubclass(owner, msgspec.Struct)) or owner is msgspec.Struct:
            continue
        body = _class_body(owner)
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if is_text and isinstance(following.value.value, str):
                texts[statement.target.id] = " ".join(following.value.value.split())
    return texts


def _class_body(owner: type) -> list[ast.stmt]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    definition = tree.body[0]
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def sections_in(annotation: object) -> Iterator[type[msgspec.Struct]]:
    """Every struct that occurs in a type, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from sections_in(argument)


def type_text(annotation: object) -> str:
    """A type in the words of somebody who writes YAML."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_text(argument) for argument in arguments)
    if origin in (tuple, list, frozenset, set):
        return f"list of {type_text(arguments[0])}"
    if origin is dict:
        return "map"
    if origin is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    names = {str: "text", int: "whole number", float: "number", bool: "yes or no", type(None): "none"}
    return names.get(typing.cast("type", annotation), "section")


def default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        return "see below"
    text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
    return f"`{text}`" if len(text) <= 60 else "see `--check`"


def write_section(path: str, section: type[msgspec.Struct], lines: list[str]) -> None:
    """One heading and one table, then the sections inside."""
    heading = path or "Top level"
    lines += [f"## {heading}" if not path else f"## `{path}`", ""]
    if path:
        lines += [" ".join((section.__doc__ or "").split()), ""]
    hints = typing.get_type_hints(section, include_extras=True)
    texts = option_texts(section)
    inner: list[tuple[str, type[msgspec.Struct]]] = []
    lines += ["| key | type | default | |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(section):
        annotation = hints[field.name]
        inner += [(f"{path}.{field.name}".lstrip("."), found) for found in sections_in(annotation)]
        text = texts.get(field.name, "")
        if not text and inner and inner[-1][0].endswith(field.name):
            text = " ".join((inner[-1][1].__doc__ or "").split("\n\n")[0].split())
        cells = (f"`{field.name}`", type_text(annotation), default_text(field), text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines.append("")
    for inner_path, inner_section in inner:
        write_section(inner_path, inner_section, lines)


def page() -> str:
    lines: list[str] = []
    write_section("", Config, lines)
    return _INTRODUCTION + "\n" + "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/configuration.md from the code.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    sys.stderr.write(f"{PAGE.name} is not what the code says: run make docs\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
