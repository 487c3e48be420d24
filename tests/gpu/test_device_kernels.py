"""Our kernels on a real device: the battery that the mutants fail, for every type (`make gpu-check`)."""

import pytest
import torch
from blocks.kernel_battery import run_battery

from paged_kv.arena import allocate_pinned_bytes
from paged_kv.kernels.device import DeviceLauncher
from paged_kv.layout import KVDtype

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", KVDtype)
def test_the_battery_passes_on_the_device(dtype: KVDtype) -> None:
    """Each kernel agrees with the oracle on the GPU as it does on the CPU."""
    run_battery(DeviceLauncher(torch.device("cuda:0")), dtype, device="cuda:0")


def test_kernels_run_on_the_stream_that_torch_uses() -> None:
    """On a side stream, kernels and torch operations queued in turn see each other's results."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            run_battery(DeviceLauncher(torch.device("cuda:0")), KVDtype.BFLOAT16, device="cuda:0")


def test_pinned_buffers_are_exactly_as_large_as_asked() -> None:
    """Host memory for transfers is page-locked and not rounded up."""
    buffer = allocate_pinned_bytes(3 << 20)
    assert buffer.nbytes == 3 << 20
    assert torch.from_numpy(buffer).is_pinned()
