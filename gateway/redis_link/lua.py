"""The Lua scripts as values: text, and the digest by which Redis knows a script it has seen."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script with what it needs before it."""

    name: str
    text: str
    sha1: str


def load_script(name: str, *preludes: str) -> Script:
    """Read a script of the package's `scripts` folder, after `prelude.lua` and what else it builds on.

    Each file's head lists its KEYS, ARGV and answer.
    """
    folder = resources.files("gateway.redis_link") / "scripts"
    text = "\n".join([(folder / f"{one}.lua").read_text() for one in ("prelude", *preludes, name)])
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()  # Redis names scripts by SHA-1
    return Script(name=name, text=text, sha1=digest)
