"""What the engine benchmark derives from its measurements: spans, history, ratios, the floor, the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.engine.engines import wanted_requirements
from bench.engine.report import Results, write_report
from bench.engine.stopwatch import Stopwatch
from bench.engine.workload import QUICK, Step, make_steps

PNG_MAGIC = b"\x89PNG"


def encode(text: str) -> list[int]:
    return list(text.encode())


def some_results() -> Results:
    results = Results(
        environment={"machine": "a test"},
        absent={"other": "not installed on this machine"},
        facts={
            name: {"version": "1", "weights": "fp32", "load_s": 0.5, "load_cpu_s": 0.25}
            for name in ("homing", "homing without reuse", "peer")
        },
        weight_bytes=1_000_000_000,
        bytes_per_s=[10e9, 10e9],
        num_repetitions=2,
    )
    results.note("decode ×1", "decode", [[1] * 256], None)
    results.note("turn 1", "ttft", [[1] * 400], None)
    results.note("turn 2", "ttft", [[1] * 480], [1] * 450)
    results.note("turn 3", "ttft", [[1] * 560], [1] * 530)
    for engine, wall_s in (("homing", 0.1), ("homing without reuse", 1.0), ("peer", 2.0)):
        for step in results.steps:
            run = {
                "wall_s": wall_s,
                "cpu_s": wall_s / 2,
                "num_tokens": 480,
                "num_cached_tokens": 448,
                "peak_bytes": 5e8,
            }
            if step == "decode ×1":
                run["num_tokens"] = 1
            if engine != "homing without reuse" or step != "decode ×1":
                results.runs.setdefault(engine, {})[step] = [run, run]
    return results


def test_report_holds_ratios_floor_reasons_and_the_turn_curve(tmp_path: Path) -> None:
    """One page says how each engine compares, what the floor is and who is missing."""
    text = write_report(tmp_path, "engine", some_results()).read_text()

    assert "| peer | 0.5 [0.5..0.5] ×0.05 |" in text  # tokens per second: 1 in 2 s against 1 in 0.1 s
    assert "| peer | 2,000 [2,000..2,000] ×20.00 |" in text
    assert "- decode ×1: 10.0 of 10.0 tokens/s, 100% of the floor" in text
    assert "| wall | 10.00 | 10.00 | 10.00 |" in text
    assert "| peer | 0.50 | 0.25 | 500 |" in text
    assert "- homing: turn 3 ÷ turn 2 = 1.00 (wall), 1.00 (CPU)" in text
    assert "- not run here: other: not installed on this machine" in text
    assert "| other | not run |\n" in text
    assert json.loads((tmp_path / "engine.json").read_text())["steps"]["turn 2"]["num_new_tokens"] == 30
    assert (tmp_path / "engine_ttft.png").read_bytes().startswith(PNG_MAGIC)


def test_report_of_a_run_without_our_engine_has_no_ratios(tmp_path: Path) -> None:
    """A peer measured alone is still a table."""
    results = some_results()
    del results.runs["homing"], results.runs["homing without reuse"]
    text = write_report(tmp_path, "engine", results).read_text()

    assert "| peer | 0.5 [0.5..0.5] |" in text
    assert "What reuse saves" not in text


def test_decoding_is_measured_while_the_whole_batch_decodes() -> None:
    """Tokens made before the last prompt's first token, or after the first prompt's end, do not count."""
    watch = Stopwatch(3)
    for counts in ([1, 0], [2, 1], [3, 2], [3, 3]):
        watch.progress(counts)

    assert watch.result()["num_decoded_tokens"] == 2
    with pytest.raises(RuntimeError, match="no token"):
        Stopwatch(1).result()


def test_each_turn_begins_with_the_history_and_repetitions_share_no_block() -> None:
    """What is reused within a chat is a true prefix, and nothing measured cold was computed before."""
    first, second = (make_steps(QUICK, encode, repetition) for repetition in (1, 2))
    turns = [step for step in first if step.name.startswith("turn")]

    assert [step.history is None for step in turns] == [True, False]
    for step in (*turns[1:], first[-1]):
        assert step.history is not None
        assert step.prompts[0][: len(step.history)] == step.history
        assert len(step.prompts[0]) > len(step.history)
    assert not _opening_blocks(first) & _opening_blocks(second)


def _opening_blocks(steps: list[Step]) -> set[tuple[int, ...]]:
    cold = [step for step in steps if step.history is None]
    return {tuple(prompt[:32]) for step in cold for prompt in step.prompts}


def test_vllm_is_installed_without_what_text_does_not_need() -> None:
    """Torch has a line of its own, torchvision would clash, extras are not wanted; everything else is."""
    asked = [
        "torch==2.13.0+cpu",
        "torchvision; platform_machine == 'x86_64'",
        "numpy",
        "x>=1; extra == 'audio'",
    ]
    assert wanted_requirements([*asked, "transformers[x] (>=4)"]) == ["numpy", "transformers[x] (>=4)"]
