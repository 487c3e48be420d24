"""Finds NVIDIA's headers: in the wheels that CuPy depends on, or in a toolkit.

CuPy's own wheel has no fp8, bf16 or fp16 header, but it has the C++ library behind <nv/target>, which those
headers include. NVRTC has that library built in, g++ does not.
"""

import importlib.util
import os
from functools import cache
from pathlib import Path


@cache
def cuda_include_folders() -> tuple[str, ...]:
    """Return the folders with NVIDIA's headers (wheels or a toolkit), or none if they are incomplete."""
    try:
        from cuda import pathfinder  # type: ignore[attr-defined]  # ships no stubs
    except ImportError:
        candidates: list[str | None] = []
    else:
        candidates = [pathfinder.find_nvidia_header_directory("cudart")]
    candidates += [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/include"]
    for folder in candidates:
        if folder and Path(folder, "cuda_fp8.h").exists() and Path(folder, "crt/host_defines.h").exists():
            found = [folder, f"{folder}/cccl", *_cupy_cccl()]
            return tuple(found) if any(Path(place, "nv/target").exists() for place in found) else ()
    return ()


def _cupy_cccl() -> list[str]:
    """Return CuPy's copy of NVIDIA's C++ library, which has the <nv/target> that the fp16 header includes."""
    cupy = importlib.util.find_spec("cupy")
    return [f"{Path(cupy.origin).parent}/_core/include/cupy/_cccl/libcudacxx"] if cupy and cupy.origin else []
