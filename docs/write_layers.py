"""Writes the picture of layers in `docs/architecture.md` from the import contracts in `pyproject.toml`.

    python docs/write_layers.py [--check]

A test keeps the page current, and import-linter keeps the contracts true, so the picture cannot lie.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- layers -->", "<!-- /layers -->"


def contracts() -> list[dict[str, Any]]:
    """All import contracts."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return found


def picture() -> str:
    """One block per layers contract over packages, top layer first."""
    lines = ["```"]
    for contract in contracts():
        if contract["type"] != "layers":
            continue
        (container,) = contract["containers"]
        lines += [f"{container}: {contract['name']}", *(f"    {layer}" for layer in contract["layers"]), ""]
    return "\n".join([*lines[:-1], "```"])


def page() -> str:
    """The whole page, with the picture of now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{picture()}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the layers in docs/architecture.md.")
    parser.add_argument("--check", action="store_true", help="only check whether the page is up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    sys.stderr.write(f"{PAGE.name} is out of date: run make docs\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
