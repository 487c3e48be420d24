"""What a release ships: wheel and source archive, built as they are published, and what they pull in."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {"gateway": "gateway", "engine_adapter": "engine_adapter", "paged_kv": "cuda/paged_kv"}
HEAVY = {
    "torch",
    "numpy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
}
RUNTIME_EXTRAS = ("", "engine", "grammar", "otel", "plot")

# Permissive, or copyleft by file only (MPL): what puts no conditions on Apache-2.0 code beside it.
ALLOWED = re.compile(r"BSD|MIT|ISC|Zlib|Apache|PSF|Python Software Foundation|MPL|Mozilla Public")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [str(BIN / "hatchling"), "build", "--directory", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(dist.glob("*.whl")))


def tracked(folder: str) -> set[str]:
    """Files of a folder that belong to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


def test_twine_finds_nothing(dist: Path) -> None:
    """The metadata and the long description are what the package index takes, strictly."""
    files = [str(path) for path in dist.iterdir()]
    result = subprocess.run(
        [BIN / "twine", "check", "--strict", *files], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout
    assert len(files) == 2


def test_the_wheel_holds_the_packages_whole(wheel: zipfile.ZipFile) -> None:
    """Every file of the three packages, scripts, kernels and pages included, and nothing else."""
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        package + name.removeprefix(folder)
        for package, folder in PACKAGES.items()
        for name in tracked(folder)
    }
    assert shipped == expected
    for suffix in (".lua", ".cu", ".cuh", ".h", "py.typed"):
        assert any(name.endswith(suffix) for name in shipped), suffix


def test_each_package_is_marked_as_typed(wheel: zipfile.ZipFile) -> None:
    """So that type checkers of users read our annotations (PEP 561)."""
    for package in PACKAGES:
        assert f"{package}/py.typed" in wheel.namelist()


def test_the_source_archive_builds_and_tests_itself(dist: Path) -> None:
    """It holds the tests, the deployment files and the Makefile, and no results of benchmarks."""
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "Makefile", "LICENSE", "constraints.txt", "README.md"} <= names
    assert tracked("tests") - tracked("tests/bench/results") <= names
    assert tracked("deploy") <= names
    assert not any(name.startswith("tests/bench/results") for name in names)


def test_the_installed_wheel_answers_to_its_name(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """`homing --version`, from the wheel's own files and not from this checkout."""
    wheel.extractall(tmp_path)
    code = (
        "import sys, gateway.main; print(gateway.main.__file__); sys.exit(gateway.main.main(['--version']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.splitlines() == [
        str(tmp_path / "gateway" / "main.py"),
        f"homing {PROJECT['version']}",
    ]


def test_the_command_is_an_entry_point(wheel: zipfile.ZipFile) -> None:
    """And its target can be imported."""
    text = next(wheel.read(name) for name in wheel.namelist() if name.endswith("entry_points.txt")).decode()
    assert "homing = gateway.main:main" in text


def test_the_wheel_says_what_it_needs(wheel: zipfile.ZipFile) -> None:
    """Without extras: no engine. Each extra of the project is there."""
    text = next(wheel.read(name) for name in wheel.namelist() if name.endswith("/METADATA")).decode()
    metadata = Parser().parsestr(text)
    core = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert not {normalise(Requirement(one).name) for one in core} & HEAVY
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert metadata["License-Expression"] == "Apache-2.0"


# -- what it pulls in


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(name: str, extra: str) -> Iterable[str]:
    """Of ours from this checkout, of others from what is installed."""
    if name != "homing":
        return importlib.metadata.requires(name) or ()
    return PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]


def all_dependencies(extras: Iterable[str]) -> set[str]:
    """Everything that an install of these extras brings on this machine, as far down as it goes."""
    done: set[tuple[str, str]] = set()
    wanted = [("homing", extra) for extra in extras]
    while wanted:
        name, extra = wanted.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        for text in requirements(name, extra):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                wanted.extend((normalise(requirement.name), one) for one in ("", *requirement.extras))
    return {name for name, _ in done} - {"homing"}


def test_a_plain_install_needs_no_engine() -> None:
    """`pip install homing`: no torch, no numpy, however far down."""
    found = all_dependencies([""])
    assert {"aiohttp", "uvloop", "idna"} <= found
    assert not found & HEAVY


def test_licences_of_all_dependencies_are_permissive() -> None:
    """Of everything that the gateway and the worker install; a new one of another kind is a decision."""
    names = sorted(all_dependencies(RUNTIME_EXTRAS))
    result = subprocess.run(
        [BIN / "pip-licenses", "--from=mixed", "--format=json", "--with-system", "--packages", *names],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    licences = {normalise(one["Name"]): one["License"] for one in json.loads(result.stdout)}
    assert licences.keys() == set(names)
    odd = {name: text for name, text in licences.items() if not ALLOWED.search(text) or "GPL" in text}
    assert odd == {}


def test_every_runtime_dependency_has_an_exact_version() -> None:
    """`constraints.txt` is a lock: what images and `make` install does not change by itself."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {
        normalise(line.partition("==")[0]) for line in lines if "==" in line and not line.startswith("#")
    }
    assert all_dependencies(RUNTIME_EXTRAS) - pinned - {"setuptools"} == set()
