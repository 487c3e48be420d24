"""Our compiled CPU kernels as functions of tensors: products by bf16 weights, norm, SiLU gate, rotation.

They take contiguous fp32 rows and run on one thread; callers check with `kernels_for` and `fits`, and use
torch's operators otherwise. They exist because torch multiplies fp32 rows by 16-bit weights only after
packing them, which takes seconds at every start and cannot use a mapped file, and because its small operators
cost more to call than to compute. Results equal torch's up to the order of summation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch.nn import functional

from paged_kv.cpu.native import native_library

SOURCE = Path(__file__).with_suffix(".c")
IN_MULTIPLE = 16  # PAIRS in the source
LANES = 8
SCRATCH_ROWS = 24  # FEW_ROWS in the source: the larger of its two uses of scratch memory
_pointer, _long = ctypes.c_void_p, ctypes.c_long


class CPUKernels:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear = library.homing_linear_bf16
        self._linear.argtypes = [_pointer, _long, _long, _pointer, _long, _pointer, _long, _pointer]
        self._rms_norm = library.homing_rms_norm
        self._rms_norm.argtypes = [_pointer, _long, _long, _pointer, ctypes.c_float, _pointer]
        self._silu_and_mul = library.homing_gated
        self._silu_and_mul.argtypes = [_pointer, _long, _long, _pointer]
        self._rotate = library.homing_rotate
        self._rotate.argtypes = [_pointer, _long, _long, _long, _long, _pointer, _pointer]
        for function in (self._linear, self._rms_norm, self._silu_and_mul, self._rotate):
            function.restype = None

    def linear(self, weights: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the product of `(num_rows, in)` fp32 rows by bf16 weights `(out, in)`, outputs side by side.

        The caller keeps the weights alive.
        """
        run, num_in = self._linear, weights[0].shape[1]
        parts, width = [], 0
        for weight in weights:
            parts.append((weight.data_ptr(), len(weight), width * 4))  # the last: where its outputs start
            width += len(weight)

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            rows = rows.contiguous()
            num_rows = rows.shape[0]
            out, scratch = torch.empty(num_rows, width), torch.empty(SCRATCH_ROWS * num_in)
            source, to, aside = rows.data_ptr(), out.data_ptr(), scratch.data_ptr()
            for address, num_out, offset in parts:
                run(source, num_rows, num_in, address, num_out, to + offset, width, aside)
            return out

        return multiply

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Scale fp32 rows `(num_rows, width)` to unit mean square, then by `weight`."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        num_rows, width = rows.shape
        self._rms_norm(rows.data_ptr(), num_rows, width, weight.data_ptr(), eps, out.data_ptr())
        return out

    def silu_and_mul(self, rows: torch.Tensor) -> torch.Tensor:
        """Return silu(left half) * right half of fp32 rows."""
        num_rows, width = rows.shape
        out = torch.empty(num_rows, width // 2)
        self._silu_and_mul(rows.data_ptr(), num_rows, width // 2, out.data_ptr())
        return out

    def rotate(self, heads: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate the first `num_heads` of contiguous `(num_tokens, heads, head_dim)`, as `rope.rotate` does.

        Changes: `heads`, in place.
        """
        num_tokens, _, head_dim = heads.shape
        half = head_dim // 2
        address, stride = heads.data_ptr(), heads.stride(0)
        self._rotate(address, num_tokens, stride, num_heads, half, cos.data_ptr(), sin.data_ptr())


def kernels_for(dtype: torch.dtype, device: torch.device) -> CPUKernels | None:
    """Return the kernels if they support this dtype, this device and the number of torch threads."""
    if dtype is not torch.float32 or device.type != "cpu" or torch.get_num_threads() != 1:
        return None
    return _open()


def fits(weight: torch.Tensor) -> bool:
    """Whether `CPUKernels.linear` can read a weight in place. Changes nothing."""
    return (
        weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.shape[1] % IN_MULTIPLE == 0
    )


@cache
def _open() -> CPUKernels | None:
    library = native_library(SOURCE)
    if library is None:
        return None
    kernels = CPUKernels(library)
    return kernels if _agrees(kernels) else None


def _agrees(kernels: CPUKernels) -> bool:
    """Whether small products equal torch's: the compiler may be broken."""
    weight = torch.linspace(-1, 1, 19 * 48).reshape(19, 48).bfloat16()
    multiply = kernels.linear([weight])
    for num_rows in (3, 8, SCRATCH_ROWS + 7):
        rows = torch.linspace(-2, 1, num_rows * 48).reshape(num_rows, 48)
        expected = functional.linear(rows, weight.float())
        if not torch.allclose(multiply(rows), expected, rtol=1e-5, atol=1e-5):
            return False
    return True
