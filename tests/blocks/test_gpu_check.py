"""The GPU check's script works without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
from kernel_tools.host import missing_tool

SCRIPT = Path(__file__).parents[1] / "gpu" / "gpu_check.py"


@pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))
def test_the_rehearsal_runs_every_measurement_on_the_cpu() -> None:
    """All timings and both models run in tiny sizes, print their tables and say that they mean nothing."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rehearse"], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for kernel in ("paged_decode", "write_kv", "gather_kv", "checksum", "copy_ranges"):
        assert done.stdout.count(kernel) == 4  # two batches, two KV types
    assert "TTFT ms by turn" in done.stdout
    assert "mean nothing" in done.stdout
