"""Compiles the .cu files with g++ and runs them on the CPU, to test them without a GPU.

Decisions: the same files that a GPU runs, unchanged, with `cuda_on_cpu.h` in front; NVIDIA's own headers
convert fp8, bf16 and fp16; compiled libraries are cached by the hash of source, shim, options and compiler.
Slow: each CUDA thread is a fiber.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from paged_kv.arena import KVArena
from paged_kv.backends.attention import AttentionBackend, make_backend
from paged_kv.backends.cupy_backend import CupyBackend
from paged_kv.kernels.headers import cuda_include_folders
from paged_kv.kernels.launcher import Argument, Shape, address_of
from paged_kv.kernels.source import KernelSource

_OPTIONS = (
    "-std=c++17",
    "-O1",
    "-shared",
    "-fPIC",
    "-fno-strict-aliasing",
    "-ffp-contract=off",  # no fused multiply-add: the same rounding on every CPU
    "-U_FORTIFY_SOURCE",  # its longjmp check forbids changing stacks
    "-D_FORTIFY_SOURCE=0",
    "-w",  # NVIDIA's headers and CUDA pragmas are not written for g++
)
_C_TYPES: "dict[str, type[ctypes._SimpleCData[Any]]]" = {
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
}
_lock = threading.Lock()  # the shim runs one launch at a time


class KernelFault(Exception):
    """The shim has stopped a kernel at a barrier or shuffle that cannot complete."""


def missing_tool() -> str | None:
    """Return what this machine lacks to run kernels on its CPU, or None."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    if not cuda_include_folders():
        return "no CUDA headers: install nvidia-cuda-runtime, nvidia-cuda-crt and cupy-cuda13x"
    return None


def cache_folder() -> Path:
    """Return where compiled libraries are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "homing", "host-kernels")


class HostLauncher:
    """Launcher that runs kernels on the CPU; the seed sets the order of warps."""

    def __init__(self, *, seed: int = 1, extra_options: tuple[str, ...] = ()) -> None:
        self._seed = seed
        self._extra_options = extra_options
        self._libraries: dict[str, ctypes.CDLL] = {}

    def launch(
        self,
        source: KernelSource,
        kernel: str,
        grid: Shape,
        num_threads: int,
        arguments: tuple[Argument, ...],
    ) -> None:
        """See Launcher. Raises KernelFault if the shim stops the kernel."""
        function = self._library(source)[f"host_{kernel}"]
        function.restype = ctypes.c_char_p
        held = [_c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(value) for value in held])
        with _lock:
            error = function(
                (ctypes.c_uint * 6)(*grid, num_threads, 1, 1), pointers, ctypes.c_uint(self._seed)
            )
        if error is not None:
            raise KernelFault(f"{kernel}: {error.decode()}")

    def _library(self, source: KernelSource) -> ctypes.CDLL:
        library = self._libraries.get(source.fingerprint)
        if library is None:
            library = ctypes.CDLL(str(build_library(source, self._extra_options)))
            self._libraries[source.fingerprint] = library
        return library


def make_backend_anywhere(
    name: str, arena: KVArena, *, num_heads: int, scale: float, sliding_window: int | None = None
) -> AttentionBackend:
    """Return what `make_backend` returns; on a host arena "cupy" runs its kernels on the CPU."""
    if name == "cupy" and arena.is_host:
        return CupyBackend(
            arena, num_heads=num_heads, scale=scale, sliding_window=sliding_window, launcher=HostLauncher()
        )
    return make_backend(name, arena, num_heads=num_heads, scale=scale, sliding_window=sliding_window)


def _c_value(argument: Argument) -> "ctypes._SimpleCData[Any]":
    if isinstance(argument, np.generic):
        return _C_TYPES[argument.dtype.name](argument.item())
    return ctypes.c_void_p(address_of(argument))


@cache
def _compiler_version() -> str:
    return subprocess.run(
        ["g++", "--version"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]


def build_library(source: KernelSource, extra_options: tuple[str, ...] = ()) -> Path:
    """Return the compiled library of a source, cached or new; raise with g++'s message if it fails."""
    if reason := missing_tool():
        raise RuntimeError(reason)
    includes = [f"-isystem{folder}" for folder in cuda_include_folders()]
    options = (*_OPTIONS, *extra_options, *source.definitions)
    shim = Path(__file__).with_name("cuda_on_cpu.h")
    identity = "\0".join([source.fingerprint, shim.read_text(), *options, *includes, _compiler_version()])
    target = cache_folder() / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    exports = "\n".join(f"EXPORT_KERNEL({kernel})" for kernel in source.kernels)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        unit, library = Path(folder, "kernels.cpp"), Path(folder, "kernel.so")
        unit.write_text(f'#include "{shim}"\n{source.text}\n{exports}\n')
        command = ["g++", *options, *includes, str(unit), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"g++ could not compile the kernels:\n{done.stderr[-4000:]}")
        library.replace(target)  # atomic: a concurrent test run sees the whole file or none
    return target
