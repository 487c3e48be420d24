"""Fenced code blocks of the pages that users read, and the single commands in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "deploy").rglob("README.md")),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block: comments gone, continued lines and open quotes joined."""
        commands: list[str] = []
        pending = ""
        for line in self.text.splitlines():
            pending += line.removesuffix("\\") if line.endswith("\\") else line + "\n"
            if line.endswith("\\") or pending.count("'") % 2:
                continue
            command = re.sub(r"\s+#.*$", "", pending.strip()) if "'" not in pending else pending.strip()
            if command and not command.startswith("#"):
                commands.append(command)
            pending = ""
        return commands


def blocks(*languages: str) -> list[Block]:
    """All blocks in one of these languages, in the order of the pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            if match[1] in languages:
                line = text.count("\n", 0, match.start()) + 1
                place = str(page.relative_to(ROOT))
                found.append(Block(page=place, line=line, language=match[1], text=match[2]))
    return found
