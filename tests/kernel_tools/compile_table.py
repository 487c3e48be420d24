"""Compiles every kernel for every architecture without a GPU and records its registers and shared memory.

NVRTC is the compiler that CuPy uses on a GPU machine, and it needs no driver: what compiles here compiles
there. A test checks the table beside this file; after an intended change, write it again:

    PYTHONPATH=cuda:tests python -m kernel_tools.compile_table

Invariant: no kernel spills registers. This module runs no kernels.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paged_kv.kernels.headers import cuda_include_folders
from paged_kv.kernels.source import KernelSource, kernel_source
from paged_kv.layout import KVDtype, KVLayout

ARCHITECTURES = (80, 89, 90)  # A100; L4, L40S, RTX 40; H100, H200
TABLE = Path(__file__).with_suffix(".csv")
_FUNCTION = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """One row of the table."""

    model: str  # head size and query heads per thread block
    kv_dtype: str
    architecture: int
    kernel: str
    registers: int
    shared_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCase:
    """A layout that the table covers."""

    model: str
    head_dim: int
    heads: int
    dtype: KVDtype

    def source(self) -> KernelSource:
        """Return its kernels; queries are bf16, as in serving, unless KV is fp32."""
        layout = KVLayout(
            num_layers=1,
            num_blocks=1,
            block_size=16,
            num_kv_heads=1,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )
        query_dtype = self.dtype if self.dtype is KVDtype.FLOAT32 else KVDtype.BFLOAT16
        return kernel_source(layout, query_dtype=query_dtype, heads=self.heads)


CASES = tuple(
    TableCase(model=f"hd{head_dim} x{heads}", head_dim=head_dim, heads=heads, dtype=dtype)
    for head_dim, heads in ((128, 4), (64, 3))  # Llama 8B; SmolLM2 135M
    for dtype in (KVDtype.BFLOAT16, KVDtype.FP8_E4M3, KVDtype.INT8, KVDtype.FLOAT32)
)


def compiler_version() -> str:
    """Return NVRTC's version, major.minor."""
    from cupy.cuda import nvrtc

    return ".".join(map(str, nvrtc.getVersion()))


def compile_source(source: KernelSource, architecture: int) -> str:
    """Return the assembler's report for sm_<architecture>; raise RuntimeError with the log if it fails."""
    from cupy.cuda import nvrtc

    program: Any = nvrtc.createProgram(source.text, "kernels.cu", [], [])
    includes = [f"-I{folder}" for folder in cuda_include_folders()]
    options = ["-std=c++17", f"-arch=sm_{architecture}", "--ptxas-options=-v", *includes, *source.definitions]
    try:
        nvrtc.compileProgram(program, options)
        return str(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"NVRTC could not compile the kernels:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def compiled_kernels(case: TableCase, architecture: int) -> Iterator[CompiledKernel]:
    """Compile one case and yield a row per kernel."""
    name, spills = "", 0
    for line in compile_source(case.source(), architecture).splitlines():
        if match := _FUNCTION.search(line):
            name = match.group(1)
        elif match := _SPILLS.search(line):
            spills = int(match.group(1)) + int(match.group(2))
        elif match := _USED.search(line):
            yield CompiledKernel(
                model=case.model,
                kv_dtype=case.dtype.value,
                architecture=architecture,
                kernel=name,
                registers=int(match.group(1)),
                shared_bytes=int(match.group(2) or 0),
                spill_bytes=spills,
            )


def read_table() -> tuple[str, list[CompiledKernel]]:
    """Return the recorded compiler version and rows."""
    with TABLE.open(newline="") as file:
        version = file.readline().removeprefix("# NVRTC ").strip()
        numbers = {field.name for field in fields(CompiledKernel) if field.type is int}
        rows = [
            CompiledKernel(**{key: int(value) if key in numbers else value for key, value in row.items()})  # type: ignore[arg-type]  # the reader yields text
            for row in csv.DictReader(file)
        ]
    return version, rows


def write_table() -> None:
    """Write the table beside this file."""
    rows = [row for case in CASES for arch in ARCHITECTURES for row in compiled_kernels(case, arch)]
    with TABLE.open("w", newline="") as file:
        file.write(f"# NVRTC {compiler_version()}\n")
        writer = csv.DictWriter(file, [field.name for field in fields(CompiledKernel)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in sorted(rows, key=lambda row: row.kernel))


if __name__ == "__main__":
    write_table()
