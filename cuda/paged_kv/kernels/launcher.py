"""The interface for running compiled kernels, on a GPU or, in tests, on the CPU."""

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from paged_kv.kernels.source import KernelSource

if TYPE_CHECKING:
    import torch

Shape: TypeAlias = tuple[int, int, int]
# Arrays are passed as the address of their first element; scalars carry their C type.
Array: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
Argument: TypeAlias = "Array | np.generic"


class Launcher(Protocol):
    """Compiles a source at first use and runs its kernels in order on the current stream."""

    def launch(
        self,
        source: KernelSource,
        kernel: str,
        grid: Shape,
        num_threads: int,
        arguments: tuple[Argument, ...],
    ) -> None:
        """Run one kernel. The caller keeps the arrays alive until the stream has passed the launch."""


def address_of(array: Array) -> int:
    """Return the address of an array's first element, on any device."""
    return int(array.ctypes.data) if isinstance(array, np.ndarray) else array.data_ptr()
