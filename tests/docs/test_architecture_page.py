"""The architecture page says what the tree and the import contracts say."""

from __future__ import annotations

import re
import subprocess
import sys

from docs.markdown_blocks import ROOT

PAGE = ROOT / "docs" / "architecture.md"


def test_the_picture_of_layers_is_written_from_the_contracts() -> None:
    """Whoever changes a contract runs `make docs`."""
    command = [sys.executable, str(ROOT / "docs" / "write_layers.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0


def test_every_file_that_the_page_names_is_there() -> None:
    """A walk through the code does not end at a file that has moved."""
    paths = re.findall(r"`((?:gateway|engine_adapter|cuda|tests|docs)/[\w/.]+)`", PAGE.read_text())
    assert len(paths) > 60
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_package_is_on_the_page() -> None:
    """A new room is introduced to the reader."""
    text = PAGE.read_text()
    rooms = [marker.parent for marker in (ROOT / "gateway").glob("*/__init__.py")]
    assert [str(room.name) for room in rooms if f"gateway/{room.name}/" not in text] == []
