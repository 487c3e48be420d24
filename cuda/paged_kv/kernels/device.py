"""Runs the kernels on a GPU through CuPy, on the stream that torch uses at that moment.

Decisions: RawModule compiles at first use for the current device and keeps the result in CuPy's disk cache
(CUPY_CACHE_DIR); CuPy's current stream is set to torch's for every launch, because CuPy's default is the
legacy stream, which would race with torch's. Arrays are passed as addresses, so bf16 and fp8, which CuPy
lacks, need no conversion.
"""

from functools import cache
from typing import Any

import numpy as np
import torch

from paged_kv.kernels.headers import cuda_include_folders
from paged_kv.kernels.launcher import Argument, Shape, address_of
from paged_kv.kernels.source import KernelSource


class DeviceLauncher:
    """Launcher on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def launch(
        self,
        source: KernelSource,
        kernel: str,
        grid: Shape,
        num_threads: int,
        arguments: tuple[Argument, ...],
    ) -> None:
        """See Launcher."""
        with _stream(torch.cuda.current_stream(self._device).cuda_stream, self._device.index or 0):
            _kernel(source, kernel)(
                grid, (num_threads, 1, 1), tuple(_value(argument) for argument in arguments)
            )

    @property
    def num_processors(self) -> int:
        """Multiprocessors of the device."""
        return int(torch.cuda.get_device_properties(self._device).multi_processor_count)


def _value(argument: Argument) -> np.generic:
    return argument if isinstance(argument, np.generic) else np.uint64(address_of(argument))


@cache
def _module(source: KernelSource) -> Any:
    import cupy

    headers = [f"-I{folder}" for folder in cuda_include_folders()[:1]]
    options = ("-std=c++17", *headers, *source.definitions)
    return cupy.RawModule(code=source.text, options=options, backend="nvrtc")


@cache
def _kernel(source: KernelSource, kernel: str) -> Any:
    return _module(source).get_function(kernel)


@cache
def _stream(address: int, device_id: int) -> Any:
    """Return torch's stream as a CuPy stream; torch's streams live as long as the process."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14; ExternalStream is deprecated there
        return cupy.cuda.Stream.from_external(_StreamAddress(address))
    return cupy.cuda.ExternalStream(address, device_id)


class _StreamAddress:
    """The CUDA stream protocol: version 0 and an address."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._address)
