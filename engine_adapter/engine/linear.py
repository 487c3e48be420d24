"""Matrix products of the forward pass, with weights laid out for this processor.

oneDNN multiplies faster by a weight it has reordered once, above all for few rows, as in decoding. torch
reaches that only through private operators, so they are tried once per (dtype, device), compared with
`F.linear`, and left alone wherever they are missing, fail or differ. The packed copy replaces the weight.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch.nn import functional

PACK_BATCH_HINT = 8  # rows that oneDNN optimises the layout for: between one decode and a small batch


class Linear(Protocol):
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply `(num_rows, in_features)` to `(num_rows, out_features)`."""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, *, allow_packed: bool = True) -> Linear:
    """Return the fastest product by `weight` `(out_features, in_features)` that this machine has."""
    if allow_packed and weight.device.type == "cpu" and packing_works(weight.dtype):
        return _PackedLinear(weight, bias)
    return _PlainLinear(weight, bias)


class _PlainLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self._weight, self._bias)


class _PackedLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_BATCH_HINT)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return product


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether packed products exist for this dtype and agree with `F.linear` on a small example."""
    if not torch._C._has_mkldnn:
        return False
    weight = torch.linspace(-1, 1, 48 * 32).reshape(48, 32).to(dtype)
    rows = torch.linspace(-1, 1, 3 * 32).reshape(3, 32).to(dtype)
    bias = torch.linspace(-1, 1, 48).to(dtype)
    try:
        packed = _PackedLinear(weight, bias)(rows)
    except (RuntimeError, AttributeError):
        return False
    return torch.allclose(packed.float(), functional.linear(rows, weight, bias).float(), rtol=2e-2, atol=2e-2)
