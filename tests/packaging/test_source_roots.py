"""The tree keeps the shape that imports depend on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_cuda_is_a_source_root_and_never_a_package() -> None:
    """torch and cupy own the name `cuda`: an __init__.py directly in cuda/ would break their imports."""
    assert not (ROOT / "cuda" / "__init__.py").exists()
    assert (ROOT / "cuda" / "paged_kv" / "__init__.py").exists()


def test_paged_kv_is_imported_by_its_own_name() -> None:
    """`import paged_kv` finds the package under cuda/, and `cuda` is not ours."""
    program = (
        "import paged_kv, importlib.util; spec = importlib.util.find_spec('cuda'); "
        "print(paged_kv.__file__); print(spec.origin if spec else None)"
    )
    lines = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/"
    ).stdout.splitlines()
    assert Path(lines[0]) == ROOT / "cuda" / "paged_kv" / "__init__.py"
    assert not lines[1].startswith(str(ROOT))


def test_the_gateway_imports_no_engine() -> None:
    """A gateway image needs neither torch nor cupy nor numpy: importing all of it loads none of them."""
    program = (
        "import pkgutil, importlib, sys, gateway\n"
        "for one in pkgutil.walk_packages(gateway.__path__, 'gateway.'):\n"
        "    if one.name not in ('gateway.replay.plot',): importlib.import_module(one.name)\n"
        "print([name for name in ('torch', 'cupy', 'numpy', 'engine_adapter') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert shown.stdout.strip() == "[]"


def test_no_code_hides_in_package_markers() -> None:
    """Every __init__.py is empty, or a docstring only."""
    for package in ("gateway", "engine_adapter", "cuda/paged_kv"):
        for marker in (ROOT / package).rglob("__init__.py"):
            text = marker.read_text().strip()
            assert not text or (text.startswith('"""') and text.endswith('"""')), marker


def test_tests_are_not_a_package() -> None:
    """Test folders mirror the packages without shadowing them."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
