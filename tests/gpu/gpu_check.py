"""`make gpu-check`: prove the kernels on a CUDA device, then time them. Under six minutes, one script.

Needs torch, cupy, numpy and pytest. Without a device it runs the CPU part (the same kernels, compiled with
g++), says that nothing was measured, and exits 0 if that part passed. Results: a table on stdout and, on a
device, tests/bench/results/gpu.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "cuda"), str(ROOT / "tests")]
RESULTS = ROOT / "tests" / "bench" / "results" / "gpu.json"
STAGE_TIMEOUT_S = 120


def run_tests(paths: list[str], device: str) -> bool:
    """Run test files without the project's pytest settings: they need plugins that a GPU machine lacks."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-x", "-c", os.devnull, "--rootdir", str(ROOT)),
        *("-p", "no:cacheprovider", "--import-mode=importlib", "-o", "pythonpath=cuda tests"),
        *(str(ROOT / path) for path in paths),
    ]
    environment = os.environ | {"PAGED_KV_DEVICE": device, "PYTHONPATH": f"{ROOT}/cuda:{ROOT}/tests"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def run_compute_sanitizer() -> dict[str, str]:
    """Run the kernels' battery under NVIDIA's memory and race checkers, where they are installed."""
    if shutil.which("compute-sanitizer") is None:
        return {"compute-sanitizer": "not installed, not run"}
    code = (
        "import torch; from blocks.kernel_battery import run_battery;"
        "from paged_kv.kernels.device import DeviceLauncher;"
        "run_battery(DeviceLauncher(torch.device('cuda:0')), device='cuda:0')"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/cuda:{ROOT}/tests"}
    verdicts = {}
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=STAGE_TIMEOUT_S
            )
            verdicts[tool] = "clean" if done.returncode == 0 else done.stdout[-2000:]
        except subprocess.TimeoutExpired:
            verdicts[tool] = f"no verdict within {STAGE_TIMEOUT_S} s"
    return verdicts


def measure(device_name: str, *, tiny: bool) -> dict[str, object]:
    """Time the kernels and the Llama-shaped models; tiny sizes only show that this script works."""
    import torch
    from gpu import kernel_timings, llama_shape

    from paged_kv.arena import free_memory_bytes

    device = torch.device(device_name)
    scale = kernel_timings.TINY if tiny else kernel_timings.FULL
    free_bytes = free_memory_bytes(device_name)
    bandwidth = kernel_timings.copy_bandwidth(device, scale)
    models: list[dict[str, object]] = []
    for shape in (llama_shape.TINY,) if tiny else (llama_shape.LLAMA_1B, llama_shape.LLAMA_8B):
        for backend in ("torch", "cupy"):
            models += llama_shape.measure_model(shape, device, backend, free_bytes)
    is_gpu = device.type == "cuda"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "torch": torch.__version__,
        "copy_bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
        "kernels": [asdict(line) for line in kernel_timings.measure_kernels(device, scale, bandwidth)],
        "models": models,
    }


def print_report(report: dict[str, object]) -> None:
    """Print the tables."""
    print(f"\n{report['device']}, copy bandwidth {report['copy_bandwidth_gb_per_s']} GB/s")
    print(
        f"{'kernel':14}{'KV':10}{'batch':>12}{'median µs':>12}{'floor µs':>11}{'of floor':>10}{'SDPA µs':>10}"
    )
    kernels = report["kernels"]
    assert isinstance(kernels, list)
    for line in kernels:
        sdpa = "" if line["sdpa_us"] is None else line["sdpa_us"]
        print(
            f"{line['name']:14}{line['kv_dtype']:10}{line['shape']:>12}{line['median_us']:>12}"
            f"{line['floor_us']:>11}{line['share_of_floor']:>10}{sdpa:>10}"
        )
    models = report["models"]
    assert isinstance(models, list)
    for line in models:
        print(f"{line['model']} {line['kv_dtype']} {line['backend']}:")
        print(
            f"  TTFT ms by turn: {line['ttft_ms_with_reuse']} with reuse, {line['ttft_ms_without']} without"
        )
        print(f"  {line['decode_tokens_per_s']} tokens/s at batch {line['decode_batch']}")
        print(f"  {line['kv_tokens_in_free_memory']} KV tokens in free memory")


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="run the timings on the CPU in tiny sizes")
    options = parser.parse_args()
    if options.rehearse:
        print_report(measure("cpu", tiny=True))
        print("rehearsal on the CPU: these numbers mean nothing")
        return 0
    import torch

    if not torch.cuda.is_available():
        passed = run_tests(
            ["tests/blocks/test_attention_contract.py", "tests/blocks/test_kernels_mutants.py"], "cpu"
        )
        print("no CUDA device here: kernels were run on the CPU through the host shim, nothing was measured")
        return 0 if passed else 1
    if not run_tests(["tests/gpu", "tests/blocks/test_attention_contract.py"], "cuda:0"):
        print("the kernels are wrong on this device: nothing was timed")
        return 1
    report = {"compute_sanitizer": run_compute_sanitizer(), **measure("cuda:0", tiny=False)}
    print_report(report)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
