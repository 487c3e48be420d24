"""Every kernel compiles for every architecture without a GPU, with the registers in the table."""

import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_tools import compile_table
from kernel_tools.compile_table import CASES, TableCase, compiled_kernels, read_table
from kernel_tools.host import missing_tool

from paged_kv.kernels.headers import cuda_include_folders

pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(not cuda_include_folders(), reason=str(missing_tool()))


def case_id(case: TableCase) -> str:
    return f"{case.dtype.value}-{case.head_dim}"


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("case", CASES[:4], ids=case_id)
def test_kernels_compile_to_what_the_table_records(case: TableCase, architecture: int) -> None:
    """With the recorded compiler rows are equal; with another, nothing spills and registers hardly grow."""
    version, rows = read_table()
    recorded = {
        row.kernel: row
        for row in rows
        if (row.model, row.kv_dtype, row.architecture) == (case.model, case.dtype.value, architecture)
    }
    compiled = {row.kernel: row for row in compiled_kernels(case, architecture)}
    assert set(compiled) == set(case.source().kernels) == set(recorded)
    for kernel, row in compiled.items():
        assert row.spill_bytes == 0, f"{kernel} spills"
        assert row.registers <= recorded[kernel].registers + 8, f"{kernel} needs more registers"
    if compile_table.compiler_version() == version:
        assert compiled == recorded


def test_the_table_covers_every_case_without_spills() -> None:
    """The recorded table has a row for each case, architecture and kernel, and none spills."""
    _, rows = read_table()
    expected = {
        (case.model, case.dtype.value, architecture, kernel)
        for case in CASES
        for architecture in compile_table.ARCHITECTURES
        for kernel in case.source().kernels
    }
    assert {(row.model, row.kv_dtype, row.architecture, row.kernel) for row in rows} == expected
    assert not any(row.spill_bytes for row in rows)


def test_a_broken_kernel_is_refused_with_the_compilers_words() -> None:
    """A source that does not compile raises with the file and line in the message."""
    source = CASES[0].source()
    broken = type(source)(
        text=source.text.replace("is_finite(values[i])", "is_finit(values[i])"),
        definitions=source.definitions,
    )
    with pytest.raises(RuntimeError, match=r"write_kv\.cu\(\d+\)(.|\n)*is_finit"):
        compile_table.compile_source(broken, 90)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here; NVRTC covers the same sources")
def test_nvcc_accepts_the_same_source(tmp_path: Path) -> None:
    """The offline compiler, where present, takes the fp8 kernels for sm_90 too."""
    source = next(case for case in CASES if case.dtype.value == "fp8_e4m3").source()
    unit = tmp_path / "kernels.cu"
    unit.write_text(source.text)
    command = [
        "nvcc",
        "-std=c++17",
        "-arch=sm_90",
        "-cubin",
        *source.definitions,
        str(unit),
        "-o",
        "/dev/null",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
