"""The capacity table's numbers follow from its own formula."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "capacity.md"


def test_the_table_follows_from_the_formula() -> None:
    """2 x layers x KV heads x head dimension x bytes per value, and what fits into 40 GiB."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    models = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    numbers = [[int(cell.replace(",", "")) for cell in cells[1:]] for cells in models if cells[1].isdigit()]
    assert len(numbers) >= 8
    for layers, heads, dimension, wide, narrow, tokens_wide, tokens_narrow in numbers:
        assert wide == 2 * layers * heads * dimension * 2
        assert narrow == wide // 2
        assert tokens_wide == 40 * 2**30 // wide
        assert tokens_narrow == 40 * 2**30 // narrow
