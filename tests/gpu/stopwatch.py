"""Times work on a device without counting the queueing of it, or on a CPU by the wall clock."""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call."""

    median_s: float
    p99_s: float
    repetitions: int


def time_calls(
    call: Callable[[int], object], device: torch.device, *, repetitions: int, warm_up: int = 3
) -> Timing:
    """Time `call(i)` for i = 0, 1, …; on a GPU by events, so that short calls include launch gaps."""
    for i in range(warm_up):
        call(i)
    if device.type != "cuda":
        seconds = []
        for i in range(repetitions):
            start = time.perf_counter()
            call(i)
            seconds.append(time.perf_counter() - start)
    else:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
        torch.cuda.synchronize(device)
        events[0].record()
        for i in range(repetitions):
            call(i)
            events[i + 1].record()
        torch.cuda.synchronize(device)
        seconds = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]
    ordered = sorted(seconds)
    return Timing(
        median_s=statistics.median(ordered),
        p99_s=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        repetitions=repetitions,
    )
