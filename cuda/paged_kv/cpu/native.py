"""Compiles our C sources for this processor, once per machine, and loads them with ctypes.

Decisions: C with the compilers' vector extensions, so one source serves x86-64 (AVX2) and ARM; a fixed target
instead of `-march=native`, so that a library runs on every machine that `is_supported` accepts and an image
can contain it (`python -m paged_kv.cpu.native FOLDER SOURCE...`, found through `$HOMING_NATIVE_KERNELS`).
Callers fall back to slower torch code: without a compiler, on another processor, or with
`HOMING_NATIVE_KERNELS=off`, the result is None; a failed compilation is logged once.
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

HEADER = Path(__file__).with_name("vectors.h")
_OPTIONS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-shared", "-fPIC", "-w")
_TARGETS = {"x86_64": ("-march=x86-64-v3",), "aarch64": ()}
_NEEDED_FLAGS = {"avx2", "fma", "bmi2", "f16c", "movbe"}  # of x86-64-v3, as Linux names them
COMPILE_TIMEOUT_S = 120.0


@cache
def native_library(source: Path) -> ctypes.CDLL | None:
    """Return the compiled source, or None if this machine cannot have it. Changes: the cache folder."""
    setting = os.environ.get("HOMING_NATIVE_KERNELS", "")
    if setting == "off" or not is_supported():
        return None
    name = _file_name(source)
    prebuilt = Path(setting, name) if setting else None
    try:
        library = prebuilt if prebuilt and prebuilt.is_file() else compile_into(_cache_folder(), source)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        logger.warning("native_kernels_missing", extra={"source": source.name, "error": words[-500:]})
        return None


def is_supported() -> bool:
    """Whether this processor can run the libraries of `compile_into`. Changes nothing."""
    machine = platform.machine()
    if machine not in _TARGETS or sys.platform != "linux":
        return False
    if machine != "x86_64":
        return True
    flags = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), ""
    )
    return set(flags.split()) >= _NEEDED_FLAGS


def compile_into(folder: Path, source: Path) -> Path:
    """Return the library of a source in `folder`; compile it if it is missing.

    Raises:
        OSError, subprocess.SubprocessError: no compiler, or the compilation failed.
    """
    target = folder / _file_name(source)
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        library = Path(aside, "library.so")
        options = [*_OPTIONS, *_TARGETS[platform.machine()], f"-I{HEADER.parent}"]
        command = ["cc", *options, str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        library.replace(target)  # atomic: another worker sees the whole file or none
    return target


def _file_name(source: Path) -> str:
    """Name the library by everything that determines it, except the compiler's version."""
    machine = platform.machine()
    identity = "\0".join([source.read_text(), HEADER.read_text(), *_OPTIONS, *_TARGETS[machine]])
    return f"{source.stem}-{machine}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"


def _cache_folder() -> Path:
    configured = os.environ.get("HOMING_CACHE")
    return (Path(configured) if configured else Path.home() / ".cache" / "homing") / "native-kernels"


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(compile_into(Path(sys.argv[1]), Path(name)))
