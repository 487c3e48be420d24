"""The kernels' sources as text, and the compiler definitions of a layout.

All kernel files are compiled together for exactly one layout, so that loop bounds and strides are constants
and register counts are known. Headers are inlined, so that a source is one self-contained string whose hash
names its cache entries. This module does not know compilers.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paged_kv.layout import KVDtype, KVLayout

FOLDER = Path(__file__).parent
HEADER = "kv_types.cuh"
FILES = ("write_kv.cu", "gather_kv.cu", "paged_decode.cu", "copy_ranges.cu", "checksum.cu")
TYPE_NUMBERS = {
    KVDtype.FLOAT32: 0,
    KVDtype.BFLOAT16: 1,
    KVDtype.FLOAT16: 2,
    KVDtype.FP8_E4M3: 3,
    KVDtype.INT8: 4,
}
# Eight would halve the cache reads of wide groups, but takes 251 registers: two blocks per processor, not 4.
MAX_HEADS_PER_BLOCK = 4

_KERNEL = re.compile(r'extern "C" __global__ void(?: __launch_bounds__\(\w+\))? (\w+)\(')


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """The text of all kernels and the definitions to compile it with."""

    text: str
    definitions: tuple[str, ...]  # as on a command line: -DNAME=VALUE

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels the text defines."""
        return tuple(_KERNEL.findall(self.text))

    @property
    def fingerprint(self) -> str:
        """Hash of our part of what determines the compiled code."""
        parts = [self.text, *self.definitions]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@cache
def joined_text(files: tuple[str, ...] = FILES) -> str:
    """Return the header and kernel files as one text; `#line` keeps file names and lines in messages."""
    parts = [f'#line 1 "{HEADER}"\n' + (FOLDER / HEADER).read_text().replace("#pragma once\n", "")]
    for name in files:
        text = (FOLDER / name).read_text().replace(f'#include "{HEADER}"', "")
        parts.append(f'#line 1 "{name}"\n{text}')
    return "\n".join(parts)


def heads_per_block(num_heads: int, num_kv_heads: int) -> int:
    """Return the query heads per thread block: the largest divisor of a group within the limit."""
    group = num_heads // num_kv_heads
    return max(size for size in range(1, MAX_HEADS_PER_BLOCK + 1) if group % size == 0)


@cache
def kernel_source(layout: KVLayout, *, query_dtype: KVDtype, heads: int) -> KernelSource:
    """Return the kernels for a layout, a query type and `heads` query heads per thread block."""
    definitions = (
        f"-DKV_DTYPE={TYPE_NUMBERS[layout.dtype]}",
        f"-DQUERY_DTYPE={TYPE_NUMBERS[query_dtype]}",
        f"-DHEAD_DIM={layout.head_dim}",
        f"-DBLOCK_SIZE={layout.block_size}",
        f"-DHEADS={heads}",
    )
    return KernelSource(text=joined_text(), definitions=definitions)
