"""The configuration page says what the code says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load_writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_reference", DOCS / "write_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["write_reference"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current() -> None:
    """Whoever adds an option runs `make docs`; a stale page does not get in."""
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == load_writer().page()


def test_every_option_is_explained() -> None:
    """An option without a word about it is one that only its author can set."""
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    silent = [row for row in rows if row.rstrip(" |").endswith("`") or row.endswith("|  |")]
    assert not silent, silent
