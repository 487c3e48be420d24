"""Matrix products of the forward pass, with weights laid out for this processor.

Decoding multiplies few rows by all weights, so it is limited by memory: half the bytes is twice the speed.
Checkpoints are published in bf16 or fp16. In order of preference:

- our own kernel multiplies fp32 rows by bf16 weights in the mapped file, without a copy (it needs a compiler
  and one thread);
- FBGEMM multiplies fp32 rows by fp16 weights and sums in fp32; it is used if every weight survives the
  conversion to fp16 and back up to 2**-25, so that the product equals the fp32 one up to summation order;
- oneDNN multiplies by a weight that it reorders once: for bf16 rows, and weights that need fp32;
- torch's plain product.

torch reaches FBGEMM and oneDNN through operators that may be missing, so each is tried once, compared with
`F.linear`, and not used if it fails or differs. The packed copy replaces the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn import functional

from engine_adapter.engine.model.cpu_kernels import CPUKernels, fits, kernels_for

PACK_BATCH_HINT = 8  # rows for which oneDNN optimises the layout: between one decode and a small batch
MAX_HALVING_ERROR = 2.0**-25  # half of fp16's smallest number
CHUNK_ROWS = 4096  # of a weight, processed together: small copies, and FBGEMM packs by columns in cache


class Linear(Protocol):
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply `(num_rows, in_features)` to `(num_rows, out_features)`."""


LinearMaker = Callable[[torch.Tensor, torch.Tensor | None], Linear]


def make_linear(
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    allow_packed: bool = True,
) -> Linear:
    """Return the fastest product on this machine by weights `(out_features, in_features)`.

    Args:
        parts: weights whose outputs are concatenated; in `dtype` or narrower.
        bias: of all outputs together.
        dtype: of the rows; None means that of the first part.
        allow_packed: False uses torch's plain product, for comparison.
    """
    dtype = dtype or parts[0].dtype
    kernels = kernels_for(dtype, parts[0].device) if allow_packed else None
    if kernels is not None and all(map(fits, parts)):
        return _MappedLinear(kernels, parts, bias)
    weight = torch.cat([part.to(dtype) for part in parts])  # a copy, one part or many
    if allow_packed and weight.device.type == "cpu":
        if is_halvable(weight) and product_works(_HalvedLinear, torch.float32):
            return _HalvedLinear(weight, bias)
        if product_works(_PackedLinear, weight.dtype):
            return _PackedLinear(weight, bias)
    return _PlainLinear(weight, bias)


def is_halvable(weight: torch.Tensor) -> bool:
    """Whether an fp32 weight consists of fp16 numbers, up to `MAX_HALVING_ERROR`. Changes nothing."""
    return weight.dtype is torch.float32 and all(
        bool((chunk - chunk.half()).abs().max() <= MAX_HALVING_ERROR)
        for chunk in torch.split(weight, CHUNK_ROWS)
    )


class _PlainLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self._weight, self._bias)


class _MappedLinear:
    def __init__(self, kernels: CPUKernels, parts: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        self._parts, self._bias = tuple(parts), bias  # keeps them alive: the product has only their addresses
        self._multiply = kernels.linear(self._parts)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product = self._multiply(rows)
        return product if self._bias is None else product.add_(self._bias)


class _PackedLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_BATCH_HINT)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return product


class _HalvedLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        pack, size = torch.ops.quantized.linear_prepack_fp16, CHUNK_ROWS
        starts = range(0, len(weight), size)
        self._chunks = [
            pack(
                weight[start : start + size].contiguous(),
                None if bias is None else bias[start : start + size],
            )
            for start in starts
        ]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        products = [torch.ops.quantized.linear_dynamic_fp16(rows, chunk) for chunk in self._chunks]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


@functools.cache
def product_works(make: LinearMaker, dtype: torch.dtype) -> bool:
    """Whether a kind of product exists for this dtype and agrees with `F.linear` on a small example."""
    weight = (torch.linspace(-1, 1, 48 * 32).reshape(48, 32)).half().to(dtype)
    rows = torch.linspace(-1, 1, 3 * 32).reshape(3, 32).to(dtype)
    bias = torch.linspace(-1, 1, 48).to(dtype)
    try:
        product = make(weight, bias)(rows)
    except (RuntimeError, AttributeError):
        return False
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    expected = functional.linear(rows, weight, bias).float()
    return torch.allclose(product.float(), expected, rtol=tolerance, atol=tolerance)
