"""Turns msgspec's validation errors into messages for users: where, and what was probably meant.

msgspec gives the place as a path from the root. Its description of the types, followed along that path, lists
the valid keys or values. Knows no particular option.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import msgspec

_UNKNOWN_KEY = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WRONG_VALUE = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[[^\[\]]*\]")
MAX_LISTED = 12


def explain(root: type, message: str) -> str:
    """``Object contains unknown field `prt` - at `$.listen` `` → ``listen: unknown key `prt`; did you …``"""
    text, _, path = message.partition(" - at `$")
    path = path.rstrip("`")
    place = type_at(root, path)
    unknown, wrong = _UNKNOWN_KEY.fullmatch(text), _WRONG_VALUE.fullmatch(text)
    if unknown is not None and isinstance(place, msgspec.inspect.StructType):
        names = [field.encode_name for field in place.fields]
        text = f"unknown key `{unknown[1]}`{_suggestion(unknown[1], names)}"
    elif wrong is not None and isinstance(place, msgspec.inspect.LiteralType):
        text += _suggestion(wrong[1].strip("'"), [str(value) for value in place.values])
    return f"{path.lstrip('.') or 'top level'}: {text}"


def _suggestion(given: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    if near:
        return f"; did you mean `{near[0]}`?"
    return f"; known: {', '.join(known)}" if len(known) <= MAX_LISTED else ""


def type_at(root: type, path: str) -> msgspec.inspect.Type | None:
    """Return the type at a path like `.backends[0].url`, None if it cannot be followed."""
    place: msgspec.inspect.Type | None = msgspec.inspect.type_info(root)
    for step in _STEP.finditer(path):
        place = _inner(place, step["key"])
    return _only(place)


def _inner(place: msgspec.inspect.Type | None, key: str | None) -> msgspec.inspect.Type | None:
    place = _only(place)
    if isinstance(place, msgspec.inspect.StructType):
        return next((field.type for field in place.fields if field.encode_name == key), None)
    if isinstance(place, msgspec.inspect.DictType):
        return place.value_type
    if isinstance(place, (msgspec.inspect.VarTupleType, msgspec.inspect.ListType)):
        return place.item_type
    return None


def _only(place: msgspec.inspect.Type | None) -> msgspec.inspect.Type | None:
    """Return T for `T | None`."""
    if not isinstance(place, msgspec.inspect.UnionType):
        return place
    types = [kind for kind in place.types if not isinstance(kind, msgspec.inspect.NoneType)]
    return types[0] if len(types) == 1 else None
