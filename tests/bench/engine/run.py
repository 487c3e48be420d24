"""`make bench-engine`: Homing's worker and other engines on one model with equal threads, interleaved.

    python tests/bench/engine/run.py [--only NAME,...] [--repetitions 3] [--quick] [--install-peers]

Every step is measured on each engine in turn before the next step begins, and everything is repeated, so
that other load on the machine meets all alike. Tokens in, tokens out: no HTTP. Never asserts: it prints and
stores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.engine.driver import EngineFailed, RunningEngine
from bench.engine.engines import CACHE, ENGINES, Engine, install, is_installed
from bench.engine.machine import MemoryProbe, OtherLoad, describe
from bench.engine.report import Results, speed, write_report
from bench.engine.workload import QUICK, Encode, Kind, Sizes, Step, make_steps

from engine_adapter.engine.checkpoint.model_store import DEFAULT_MODEL_ID, prepare_model
from engine_adapter.engine.core.config import fast_dtype
from engine_adapter.engine.text.tokenizer import load_tokenizer

RESULTS = Path(__file__).resolve().parents[1] / "results"
MAX_MODEL_LEN = 4608
WARM_UP = (
    ([[5] * 512], 1),
    ([[7] * 64] * 8, 4),
)  # prompts, tokens of each: loads code, packs and sizes buffers


def start_engines(arguments: argparse.Namespace, model: Path) -> tuple[list[RunningEngine], dict[str, str]]:
    """Start the installed engines; report the reason for the others."""
    only = arguments.only.split(",") if arguments.only else None
    options = {
        "model": str(model),
        "num_threads": arguments.threads,
        "dtype": "bf16" if fast_dtype("cpu") is torch.bfloat16 else "fp32",
        "max_model_len": MAX_MODEL_LEN,
    }
    running: list[RunningEngine] = []
    absent: dict[str, str] = {}
    for engine in ENGINES:
        reason = _why_absent(engine, only, arguments.install_peers)
        if reason is None:
            try:
                running.append(_start(engine, options))
                continue
            except EngineFailed as error:
                reason = str(error)
        absent[engine.name] = reason
        print(f"not run: {engine.name}: {reason}", flush=True)
    return running, absent


def _why_absent(engine: Engine, only: list[str] | None, may_install: bool) -> str | None:
    if only is not None and not any(engine.name.startswith(name) for name in only):
        return "left out by --only"
    if is_installed(engine, CACHE):
        return None
    if not may_install:
        return "not installed on this machine; --install-peers does it"
    print(f"installing {engine.name} (minutes)", flush=True)
    try:
        install(engine, CACHE)
    except (subprocess.SubprocessError, OSError) as error:
        return f"cannot be installed ({error})"
    return None


def _start(engine: Engine, options: dict[str, object]) -> RunningEngine:
    running = RunningEngine(engine, CACHE, options)
    try:
        for prompts, num_tokens in WARM_UP:
            for part in [prompts] if len(prompts) <= engine.max_sequences else [prompts[:1]]:
                running.run(part, num_tokens)
    except EngineFailed:
        running.stop()
        raise
    print(f"ready: {engine.name} ({running.facts['version']}, {running.facts['weights']})", flush=True)
    return running


def measure_all(
    running: list[RunningEngine],
    encode: Encode,
    arguments: argparse.Namespace,
    results: Results,
) -> None:
    """Repeat all steps on all engines, until done or until another repetition would exceed the budget."""
    probe = MemoryProbe(arguments.threads)
    sizes = QUICK if arguments.quick else Sizes()
    start_s = time.monotonic()
    for repetition in range(1, arguments.repetitions + 1):
        elapsed_s = time.monotonic() - start_s
        if repetition > 1 and elapsed_s * repetition / (repetition - 1) > arguments.budget_s:
            print(f"time budget used up after {repetition - 1} repetitions", flush=True)
            break
        for step in make_steps(sizes, encode, repetition):
            results.note(step.name, step.kind.value, step.prompts, step.history)
            order = running if repetition % 2 else running[::-1]
            for engine in order.copy():
                if engine.can(step):
                    _measure(engine, step, repetition, running, results)
        results.bytes_per_s.append(probe.bytes_per_s())
        results.num_repetitions = repetition
        print(f"repetition {repetition} ended after {time.monotonic() - start_s:.0f} s", flush=True)
        write_report(arguments.folder, arguments.name, results)  # an interrupted run keeps what it has


def _measure(
    engine: RunningEngine, step: Step, repetition: int, running: list[RunningEngine], results: Results
) -> None:
    """Measure one step. Changes: an engine that fails leaves the run and is reported."""
    name = engine.engine.name
    try:
        measured = engine.measure(step)
    except EngineFailed as error:
        running.remove(engine)
        engine.stop()
        results.absent[name] = f"from {step.name!r} of repetition {repetition} on: {error}"
        return
    results.runs.setdefault(name, {}).setdefault(step.name, []).append(measured)
    text = f"{measured['wall_s'] * 1e3:9.0f} ms, {measured['cpu_s'] * 1e3:7.0f} ms CPU"
    if step.kind is not Kind.TTFT:
        text += f", {speed(measured):7.1f} tokens/s"
    print(f"{repetition} {step.name:14} {name:24} {text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="comma-separated beginnings of names; homing is needed for ratios")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of every engine")
    parser.add_argument("--budget-s", type=float, default=420.0, help="begin no repetition that ends later")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the benchmark itself")
    parser.add_argument("--install-peers", action="store_true", help="make environments that are missing")
    parser.add_argument("--name", default="engine", help="name of the result files")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the result files")
    return parser.parse_args()


def weight_bytes(directory: Path) -> int:
    """Bytes that a decode step of ours reads: two a weight, and the embedding is also the output head."""
    return (directory / "model.safetensors").stat().st_size


def main() -> None:
    arguments = parse_arguments()
    directory = prepare_model(None, lambda line: print(line, flush=True))
    tokenizer = load_tokenizer(directory, ())
    environment = describe(" ".join(["python tests/bench/engine/run.py", *sys.argv[1:]]))
    environment["model"] = DEFAULT_MODEL_ID
    environment["threads"] = f"{arguments.threads} per engine"
    load = OtherLoad()
    running, absent = start_engines(arguments, directory)
    results = Results(environment=environment, absent=absent, weight_bytes=weight_bytes(directory))
    results.facts = {engine.engine.name: engine.facts for engine in running}
    started = list(running)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        measure_all(
            running, lambda text: tokenizer.encode(text, add_special_tokens=False), arguments, results
        )
    finally:
        for engine in started:
            engine.stop()
    environment["other load"] = f"{load.num_cpus():.1f} of {os.cpu_count()} CPUs busy with other programs"
    print(write_report(arguments.folder, arguments.name, results).read_text())


if __name__ == "__main__":
    main()
