"""A planted fault of each class is caught: the proof that the kernel checks can fail."""

from dataclasses import dataclass, replace

import pytest
from blocks.kernel_battery import run_battery
from kernel_tools.host import HostLauncher, KernelFault, missing_tool

from paged_kv.kernels.launcher import Argument, Shape
from paged_kv.kernels.source import KernelSource, joined_text

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))
SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault: in a file, behind `after`, the first occurrence of `correct` becomes `wrong`."""

    name: str
    file: str
    after: str = ""
    correct: str
    wrong: str

    def text(self) -> str:
        """Return the changed file behind the header."""
        text = joined_text((self.file,))
        place = text.index(self.correct, text.index(self.after, text.index(f'"{self.file}"')))
        return text[:place] + self.wrong + text[place + len(self.correct) :]


def in_write(name: str, correct: str, wrong: str) -> Mutant:
    return Mutant(name=name, file="write_kv.cu", correct=correct, wrong=wrong)


def in_gather(name: str, correct: str, wrong: str) -> Mutant:
    return Mutant(name=name, file="gather_kv.cu", after="gather_kv(", correct=correct, wrong=wrong)


def in_decode(name: str, correct: str, wrong: str, after: str = "") -> Mutant:
    return Mutant(name=name, file="paged_decode.cu", after=after, correct=correct, wrong=wrong)


MUTANTS = (
    in_decode("block table off by one", "[token / BLOCK_SIZE]", "[(token + 1) / BLOCK_SIZE]"),
    in_decode("missing barrier", "__syncthreads();", ""),
    in_decode("divergent barrier", "__syncthreads();", "if (threadIdx.x < 96) __syncthreads();"),
    in_decode("keys with the values' scale", "key.scale()", "value.scale()"),
    in_decode("values without their scale", " * rows.value_scales[step]", ""),
    in_decode("unmasked tail", "token < end;", "token <= end;"),
    in_decode("last token dropped", "first + tokens, context_len)", "first + tokens, context_len - 1)"),
    in_decode("window one too small", "context_len - sliding_window :", "context_len - sliding_window + 1 :"),
    in_decode("scores over half the lanes", "distance = LANES / 2", "distance = LANES / 4"),
    in_decode("no rescaling to a new maximum", "state.mixed[head][i] *= correction;", ";"),
    in_decode("splits merged unweighted", "weight_sum += weight *", "weight_sum +=", "merge_splits("),
    in_decode("wrong head of a group", "layer_tile + first_head / (", "layer_tile + 1 - first_head / ("),
    in_decode("values from the next head's keys", "key_tile + num_kv_heads}", "key_tile + 1}"),
    in_decode(
        "exit before a shuffle", "Softmax state;", "if (first_value() >= HEAD_DIM) return; Softmax state;"
    ),
    in_write("scale of the first lane only", "distance = LANES / 2", "distance = 0"),
    in_write("wrong layer", "layer_tile + is_value", "is_value"),
    in_write("scale not that of the reader", "__half2float(stored) * SCALE_UNIT", "exact * SCALE_UNIT"),
    in_write("NaN not silenced", "values[i] == values[i] ? scaled : 0.0f", "scaled"),
    in_write("infinity in the scale", "is_finite(values[i]) ?", "true ?"),
    in_gather("offset and block swapped", "token % BLOCK_SIZE", "token / BLOCK_SIZE"),
    in_gather("gather without the scale", "values[i] *= scale", "values[i] *= 1.0f"),
    Mutant(name="checksum blind to order", file="checksum.cu", correct="(i + 1) * 0x", wrong="0x"),
    Mutant(
        name="copy stops early",
        file="copy_ranges.cu",
        correct="range_bytes / 16",
        wrong="range_bytes / 16 - 1",
    ),
)


class MutantLauncher(HostLauncher):
    """Runs the changed file's kernels in place of the true ones."""

    def __init__(self, mutant: Mutant, *, seed: int, extra_options: tuple[str, ...] = ()) -> None:
        super().__init__(seed=seed, extra_options=extra_options)
        self._text = mutant.text()

    def launch(
        self,
        source: KernelSource,
        kernel: str,
        grid: Shape,
        num_threads: int,
        arguments: tuple[Argument, ...],
    ) -> None:
        changed = replace(source, text=self._text)
        super().launch(changed if kernel in changed.kernels else source, kernel, grid, num_threads, arguments)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_caught(mutant: Mutant) -> None:
    """The battery differs from the oracle, or the shim stops the kernel, under one of 3 orders."""
    for seed in SEEDS:
        try:
            run_battery(MutantLauncher(mutant, seed=seed))
        except (AssertionError, KernelFault):
            return
    pytest.fail("no check noticed the fault")


@pytest.mark.parametrize("seed", [0, *SEEDS, 12345])
def test_the_kernels_pass_under_every_order_of_warps(seed: int) -> None:
    """The true sources agree with the oracle whichever warp runs ahead."""
    run_battery(HostLauncher(seed=seed))
