"""The Lua scripts: their text, and the digest by which Redis knows a script that it has run before."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script, with its constants and preludes prepended."""

    name: str
    text: str
    sha1: str


def load_script(name: str, *preludes: str, constants: Mapping[str, str | int] | None = None) -> Script:
    """Read a script of the `scripts` folder, with `prelude.lua` and the given preludes prepended.

    A rule that Python checks too is defined in Python and given to the script as `constants`, which become
    its first lines. Each script begins with a list of its KEYS, ARGV and return value.
    """
    folder = resources.files("gateway.redis_link") / "scripts"
    lines = [f"local {key} = {_literal(value)}" for key, value in (constants or {}).items()]
    parts = [(folder / f"{part}.lua").read_text() for part in ("prelude", *preludes, name)]
    text = "\n".join([*lines, *parts])
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()  # Redis names scripts by SHA-1
    return Script(name=name, text=text, sha1=digest)


def _literal(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    assert value.isascii(), value
    assert value.isprintable(), value
    assert not {"'", "\\"} & set(value), value
    return f"'{value}'"
