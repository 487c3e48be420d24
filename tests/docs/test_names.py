"""What the documentation names is there: metrics, options."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from docs.markdown_blocks import PAGES, ROOT

from gateway.config.config import Config
from gateway.config.mistakes import type_at

DESIGNS = sorted((ROOT / "gateway").rglob("DESIGN.md"))
METRICS = re.findall(
    r"\| `(\w+)` \| (?:counter|gauge|histogram)",
    (ROOT / "gateway" / "observability" / "METRICS.md").read_text(),
)
SECTIONS = "|".join(one.encode_name for one in msgspec.structs.fields(Config))
OPTION = re.compile(rf"`((?:{SECTIONS})(?:\.[a-z_]+)+)(?!\.json)[`: ]")


@pytest.mark.parametrize("page", [*PAGES, *DESIGNS], ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_and_options_exist(page: Path) -> None:
    """A reader who types a name from the page finds it."""
    text = page.read_text(encoding="utf-8")
    metrics = {re.sub(r"_(bucket|sum|count)$", "", one) for one in re.findall(r"\bhoming_[a-z_]+", text)}
    assert metrics <= set(METRICS)
    options = [one for one in OPTION.findall(text) if not one.endswith(".json")]
    assert [one for one in options if type_at(Config, f".{one}") is None] == []
