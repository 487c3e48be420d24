"""Our compiled kernels against torch, and what happens without them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from engine_adapter.engine.model import cpu_kernels
from engine_adapter.engine.model.cpu_kernels import CPUKernels, fits, kernels_for
from engine_adapter.engine.model.linear import make_linear
from engine_adapter.engine.model.rope import rotate
from paged_kv.cpu import native
from paged_kv.cpu.native import compile_into, is_supported, native_library

pytestmark = pytest.mark.skipif(not is_supported(), reason="no kernels for this processor")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The kernels are for one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def kernels() -> CPUKernels:
    opened = kernels_for(torch.float32, torch.device("cpu"))
    assert opened is not None
    return opened


@pytest.mark.parametrize("num_rows", [*range(1, 10), 16, 23, 24, 25, 29, 30, 31, 41])
@pytest.mark.parametrize(("num_in", "num_out"), [(16, 1), (48, 7), (80, 33), (1552, 50)])
def test_products_are_those_of_torch(kernels: CPUKernels, num_rows: int, num_in: int, num_out: int) -> None:
    """Any number of rows, inputs and outputs: the fp32 product, and nothing beside it is written."""
    rows, weight = torch.randn(num_rows, num_in), torch.randn(num_out, num_in).bfloat16()
    expected = functional.linear(rows.double(), weight.double()).float()
    torch.testing.assert_close(kernels.linear([weight])(rows), expected, rtol=1e-4, atol=1e-4)
    beside = kernels.linear([weight, weight[:1], weight])(rows)
    torch.testing.assert_close(
        beside, torch.cat([expected, expected[:, :1], expected], 1), rtol=1e-4, atol=1e-4
    )


def test_a_row_does_not_depend_on_its_neighbours(kernels: CPUKernels) -> None:
    """A NaN or an infinity in one row stays in that row."""
    rows, weight = torch.randn(40, 64), torch.randn(20, 64).bfloat16()
    for count in (8, 20, 40):
        clean = kernels.linear([weight])(rows[:count])
        dirty = rows[:count].clone()
        dirty[3, 5], dirty[4, 0] = torch.nan, torch.inf
        product = kernels.linear([weight])(dirty)
        kept = [row for row in range(count) if row not in (3, 4)]
        assert torch.equal(product[kept], clean[kept])
        assert not product[3].isfinite().any()


def test_every_bf16_number_is_widened_exactly(kernels: CPUKernels) -> None:
    """A unit row picks weights out unchanged, subnormal and huge ones included."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    weight = codes[codes.isfinite()].view(-1, 16)
    product = kernels.linear([weight])(torch.eye(16)).T
    assert torch.equal(product, weight.float())


@pytest.mark.parametrize("width", [8, 24, 576])
def test_norm_is_that_of_torch(kernels: CPUKernels, width: int) -> None:
    """Rows of any scale, zero included, and rows that are a view."""
    rows = torch.randn(5, width) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 3.0])[:, None]
    weight = torch.randn(width)
    expected = functional.rms_norm(rows, (width,), weight, 1e-5)
    torch.testing.assert_close(kernels.rms_norm(rows, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)
    strided = rows.repeat(1, 2)[:, :width]
    torch.testing.assert_close(kernels.rms_norm(strided, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)


def test_gate_is_that_of_torch(kernels: CPUKernels) -> None:
    """Over the whole range of silu, where the exponential over- and underflows too."""
    gate = torch.cat([torch.linspace(-200, 200, 4000), torch.tensor([0.0, -0.0, 1e30, -1e30] * 2)])
    rows = torch.stack([torch.cat([gate, torch.full_like(gate, 3.0)])])
    expected = functional.silu(gate)[None] * 3.0
    torch.testing.assert_close(kernels.silu_and_mul(rows), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("head_dim", [16, 64])
def test_rotation_is_that_of_torch(kernels: CPUKernels, head_dim: int) -> None:
    """The first heads of each token are turned in place, the others stay."""
    heads = torch.randn(5, 4, head_dim)
    cos, sin = torch.randn(5, 1, head_dim), torch.randn(5, 1, head_dim)
    expected = torch.cat([rotate(heads[:, :3], cos, sin), heads[:, 3:]], dim=1)
    kernels.rotate(heads, 3, cos, sin)
    torch.testing.assert_close(heads, expected)


def test_only_what_the_kernels_can_read_goes_to_them() -> None:
    """Another dtype, width or layout, several threads, bf16 rows: torch computes."""
    assert fits(torch.zeros(3, 32, dtype=torch.bfloat16))
    assert not fits(torch.zeros(3, 32))
    assert not fits(torch.zeros(3, 24, dtype=torch.bfloat16))
    assert not fits(torch.zeros(32, 3, dtype=torch.bfloat16).T)
    assert kernels_for(torch.bfloat16, torch.device("cpu")) is None
    torch.set_num_threads(2)
    assert kernels_for(torch.float32, torch.device("cpu")) is None


@pytest.mark.parametrize("num_threads", [1, 2])
def test_mapped_and_copied_weights_give_one_product(num_threads: int) -> None:
    """A narrow weight with a bias, in parts, read in place or copied."""
    torch.set_num_threads(num_threads)
    rows, parts, bias = torch.randn(6, 32), list(torch.randn(3, 5, 32).bfloat16()), torch.randn(15)
    expected = functional.linear(rows, torch.cat(parts).float(), bias)
    product = make_linear(parts, bias, dtype=torch.float32)(rows)
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)


def test_without_a_compiler_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No `cc`, or one that refuses: None and one line in the log, never an error."""
    monkeypatch.setenv("HOMING_CACHE", str(tmp_path))
    broken = tmp_path / "broken.c"
    broken.write_text("this is not C")
    assert native_library(broken) is None
    monkeypatch.setenv("PATH", "")
    sound = tmp_path / "sound.c"
    sound.write_text("int one(void) { return 1; }")
    assert native_library(sound) is None
    assert [record.message for record in caplog.records] == ["native_kernels_missing"] * 2


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HOMING_NATIVE_KERNELS=off leaves everything to torch."""
    monkeypatch.setenv("HOMING_NATIVE_KERNELS", "off")
    source = tmp_path / "unused.c"
    source.write_text("int one(void) { return 1; }")
    assert native_library(source) is None


def test_an_image_brings_its_kernels_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled ahead by the module's command, they are found where no compiler is."""
    command = [sys.executable, "-m", native.__name__, str(tmp_path), str(cpu_kernels.SOURCE)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert Path(printed.strip()) == compile_into(tmp_path, cpu_kernels.SOURCE)
    monkeypatch.setenv("HOMING_NATIVE_KERNELS", str(tmp_path))
    monkeypatch.setenv("HOMING_CACHE", "/proc/nowhere")
    native_library.cache_clear()
    try:
        assert native_library(cpu_kernels.SOURCE) is not None
    finally:
        native_library.cache_clear()
