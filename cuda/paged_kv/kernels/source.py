"""The kernels' sources as text: which exist, how a layout becomes compiler definitions, what a change is.

A kernel file is compiled for exactly one layout, so that loop bounds and strides are constants and registers
are known. Headers are put in line: a source is then one self-contained string whose hash names every cache
entry. This module knows no compiler.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paged_kv.layout import KVDtype, KVLayout

FOLDER = Path(__file__).parent
MODULES = ("write_kv", "gather_kv", "paged_decode", "copy_ranges", "checksum")
TYPE_NUMBERS = {
    KVDtype.FLOAT32: 0,
    KVDtype.BFLOAT16: 1,
    KVDtype.FLOAT16: 2,
    KVDtype.FP8_E4M3: 3,
    KVDtype.INT8: 4,
}
MAX_HEADS_PER_BLOCK = (
    4  # 8 would halve the L2 reads of wide groups and need more registers than 3 blocks leave
)

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_KERNEL = re.compile(r'extern "C" __global__ void(?: __launch_bounds__\(\w+\))? (\w+)\(')


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """One module's text and the definitions it is compiled with."""

    module: str
    text: str
    definitions: tuple[str, ...]  # as on a command line: -DNAME=VALUE

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels the text defines."""
        return tuple(_KERNEL.findall(self.text))

    @property
    def fingerprint(self) -> str:
        """Hash of everything of ours that decides the compiled code."""
        parts = [self.text, *self.definitions]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@cache
def module_text(module: str) -> str:
    """Return a module's source with our headers in line."""
    text = (FOLDER / f"{module}.cu").read_text()
    return _INCLUDE.sub(lambda match: (FOLDER / match.group(1)).read_text(), text)


def heads_per_block(num_heads: int, num_kv_heads: int) -> int:
    """Return how many query heads a thread block takes: the largest part of a group within the limit."""
    group = num_heads // num_kv_heads
    return max(size for size in range(1, MAX_HEADS_PER_BLOCK + 1) if group % size == 0)


def layout_definitions(layout: KVLayout, query_dtype: KVDtype, heads: int) -> tuple[str, ...]:
    """Return the definitions that specialise a module for a layout, a query type and heads per block."""
    return (
        f"-DKV_DTYPE={TYPE_NUMBERS[layout.dtype]}",
        f"-DQUERY_DTYPE={TYPE_NUMBERS[query_dtype]}",
        f"-DHEAD_DIM={layout.head_dim}",
        f"-DBLOCK_SIZE={layout.block_size}",
        f"-DHEADS={heads}",
    )


def kernel_source(
    module: str, layout: KVLayout, *, query_dtype: KVDtype = KVDtype.FLOAT32, heads: int = 1
) -> KernelSource:
    """Return a module specialised for a layout; byte movers are the same for all."""
    needs_layout = "kv_types.cuh" in (FOLDER / f"{module}.cu").read_text()
    definitions = layout_definitions(layout, query_dtype, heads) if needs_layout else ()
    if needs_layout and module != "paged_decode":  # one build whatever the grouping of heads
        definitions = definitions[:-1]
    return KernelSource(module=module, text=module_text(module), definitions=definitions)
