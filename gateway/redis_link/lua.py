"""The Lua scripts: their text, and the digest by which Redis knows a script that it has run before."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script, with its preludes prepended."""

    name: str
    text: str
    sha1: str


def load_script(name: str, *preludes: str) -> Script:
    """Read a script of the `scripts` folder, with `prelude.lua` and the given preludes prepended.

    Each script begins with a list of its KEYS, ARGV and return value.
    """
    folder = resources.files("gateway.redis_link") / "scripts"
    text = "\n".join([(folder / f"{part}.lua").read_text() for part in ("prelude", *preludes, name)])
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()  # Redis names scripts by SHA-1
    return Script(name=name, text=text, sha1=digest)
