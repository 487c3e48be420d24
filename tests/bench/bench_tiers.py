"""The first turn after a restart against computing it: `pytest -m bench tests/bench/bench_tiers.py -s`.

Each life of the worker is a process of its own, so that nothing but the disk connects them: one computes a
prompt, the next ones find it in the folder. Before each, the segment files are dropped from the page cache
(`cold`: what a machine after a reboot sees; the host of a virtual disk may still cache) or read through
(`warm`: what a restarted process sees). `raw` reads the same number of bytes of the same files with plain
sequential `pread`s, in the same state. Results: tests/bench/results/tiers.json and lines on stdout. The time
to the first token is the engine's, from adding the request to its first output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bench.engine.machine import OtherLoad

from engine_adapter.engine.checkpoint.loader import load_model
from engine_adapter.engine.checkpoint.model_store import prepare_model
from engine_adapter.engine.core.config import EngineConfig
from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.kv_selftest import SELFTEST_TEXTS
from engine_adapter.engine.kv.sequence import EngineRequest
from engine_adapter.engine.kv.tiers.tier_config import TierConfig
from engine_adapter.engine.model.sampling import SamplingParams
from engine_adapter.engine.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.bench, pytest.mark.model]

LENGTHS = (4096,)
REPETITIONS = 2
READ_BYTES = 1 << 20
RESULTS = Path(__file__).parent / "results" / "tiers.json"


def life(folder: Path, kv_dtype: str, num_tokens: int) -> dict[str, float]:
    """One process: open, answer one prompt with one token, close."""
    directory = prepare_model(None)
    config = EngineConfig(
        dtype="fp32",
        kv_dtype=kv_dtype,
        kv_memory_bytes=512 << 20,
        max_kv_mean_kl=1.0,
        tiers=TierConfig(disk_path=folder, disk_bytes=2 << 30),
    )
    loaded = load_model(directory, config.torch_dtype)
    tokenizer = load_tokenizer(directory, loaded.config.eos_token_ids)
    text = " ".join(SELFTEST_TEXTS)
    tokens = tokenizer.encode(f"{num_tokens} " + text * (1 + num_tokens // len(tokenizer.encode(text))))
    start_s = time.perf_counter()
    engine = LLMEngine(loaded, config)
    opened_s = time.perf_counter() - start_s
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    engine.add_request(
        EngineRequest(request_id="turn", prompt_token_ids=tokens[:num_tokens], sampling=sampling)
    )
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    ttft_s, ttft_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    disk = engine.stats().tiers["disk"]
    engine.close()
    return {
        "token_id": outputs[-1].new_token_ids[0],
        "ttft_s": ttft_s,
        "ttft_cpu_s": ttft_cpu_s,
        "engine_build_s": opened_s,
        "cached_tokens": outputs[-1].num_cached_tokens,
        "complete_block_tokens": (num_tokens - 1) // 16 * 16,
        "loaded_bytes": disk.num_loaded_bytes,
        "reader_bytes_per_s": disk.read_bytes_per_s or 0.0,
    }


def run_life(folder: Path, kv_dtype: str, num_tokens: int) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, __file__, str(folder), kv_dtype, str(num_tokens)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def prepare_files(folder: Path, state: str) -> None:
    """Bring the segment files into the page cache, or out of it."""
    os.sync()
    for path in folder.glob("segment-*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        if state == "cold":
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(descriptor, READ_BYTES):
                pass
        os.close(descriptor)


def raw_bytes_per_s(folder: Path, num_bytes: int) -> float:
    """Read as many bytes of the files, one after the other."""
    buffer, left, start_s = bytearray(READ_BYTES), num_bytes, time.perf_counter()
    for path in sorted(folder.glob("segment-*.kv")):
        descriptor = os.open(path, os.O_RDONLY)
        offset = 0
        while left > 0 and (count := os.preadv(descriptor, [buffer], offset)):
            offset, left = offset + count, left - count
        os.close(descriptor)
    return (num_bytes - left) / (time.perf_counter() - start_s)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kv_dtype", ["fp32", "fp8_e4m3"])
def test_first_turn_after_a_restart(tmp_path: Path, kv_dtype: str) -> None:
    """Measure; assert only that every complete block was found and the first token is the same."""
    lines: list[dict[str, Any]] = []
    load = OtherLoad()
    for num_tokens in LENGTHS:
        folder = tmp_path / str(num_tokens)
        computed = run_life(folder, kv_dtype, num_tokens)
        for state in ("cold", "warm"):
            for _ in range(REPETITIONS):
                prepare_files(folder, state)
                raw = raw_bytes_per_s(folder, int(computed["complete_block_tokens"] * 1e9))
                prepare_files(folder, state)
                restored = run_life(folder, kv_dtype, num_tokens)
                assert restored["cached_tokens"] == computed["complete_block_tokens"]
                assert restored["token_id"] == computed["token_id"]
                lines.append(
                    {"kv_dtype": kv_dtype, "num_tokens": num_tokens, "files": state}
                    | {"recompute_ttft_s": computed["ttft_s"], "recompute_cpu_s": computed["ttft_cpu_s"]}
                    | {"raw_bytes_per_s": raw, **restored}
                )
                print(_line(lines[-1]))
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[kv_dtype] = {"other_busy_cpus": round(load.num_cpus(), 2), "lines": lines}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def _line(values: dict[str, Any]) -> str:
    return (
        f"{values['kv_dtype']:9} {values['num_tokens']:5} tokens, {values['files']}: restored "
        f"{values['ttft_s'] * 1e3:7.0f} ms ({values['ttft_cpu_s'] * 1e3:.0f} CPU), computed "
        f"{values['recompute_ttft_s'] * 1e3:8.0f} ms ({values['recompute_cpu_s'] * 1e3:.0f} CPU), ratio "
        f"{values['ttft_s'] / values['recompute_ttft_s']:.4f}, {values['loaded_bytes'] >> 20} MiB, read "
        f"{values['reader_bytes_per_s'] / 1e9:.2f} GB/s, raw {values['raw_bytes_per_s'] / 1e9:.2f} GB/s"
    )


if __name__ == "__main__":
    print(json.dumps(life(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
