"""Files and functions of the source roots stay small enough to be read at once."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("gateway", "engine_adapter", "cuda/paged_kv")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".lua", ".js", ".css", ".c", ".h", ".cu", ".cuh") and "vendor" not in path.parts
]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def test_no_file_is_long() -> None:
    """A file holds one idea."""
    assert [
        (str(path.relative_to(ROOT)), num_lines)
        for path in SOURCES
        if (num_lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ] == []


def test_no_function_is_long() -> None:
    """A function fits one screen."""
    found = []
    for path in SOURCES:
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    num_lines = (node.end_lineno or 0) - node.lineno + 1
                    if num_lines > MAX_FUNCTION_LINES:
                        found.append((str(path.relative_to(ROOT)), node.name, num_lines))
    assert found == []
