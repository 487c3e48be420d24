"""Writes `docs/configuration.md` from the configuration's types: names, types, defaults and descriptions.

    python docs/write_reference.py            write the page
    python docs/write_reference.py --check    exit 1 if the page is out of date

The descriptions are the docstrings of the options in the code.
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

The configuration is one YAML file, given with `homing gateway --config FILE`. Every option has a default
that suits one machine, so an empty file is valid. Unknown keys, duplicate keys and invalid values are
refused at start, and the error names their path. `homing gateway --config FILE --check` prints the
configuration with all defaults. Names end with the unit: `_s` is seconds, `_bytes` bytes. `make docs`
generates this page from the code.
"""


def option_texts(section: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring below each field of a struct and its bases, by field name."""
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
    """Yield every struct that occurs in a type, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from sections_in(argument)


def type_text(annotation: object) -> str:
    """Describe a type for people who write YAML."""
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
    """Write a heading and a table, then the sections inside."""
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
    parser.add_argument("--check", action="store_true", help="only check whether the page is up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    sys.stderr.write(f"{PAGE.name} is out of date: run make docs\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
