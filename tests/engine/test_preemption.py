"""A preemption never changes the text, and with a host tier nothing is computed again."""

from __future__ import annotations

import pytest
from engine.test_engine_oracle import CASES, prompt_with, random_tokens
from engine.test_tiers_engine import shut_down, tiered_engine
from engine.tiny_models import generate, greedy_request, run_all, tiny_engine, tokens_of

from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.scheduling.scheduler import ScheduledSequence


def count_computed(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each step will add the number of tokens that it computes."""
    computed: list[int] = []
    run = engine._runner.run

    def counted(scheduled: list[ScheduledSequence]) -> object:
        computed.append(sum(item.num_new_tokens for item in scheduled))
        return run(scheduled)

    monkeypatch.setattr(engine._runner, "run", counted)
    return computed


@pytest.mark.parametrize("host_bytes", [0, 1 << 18])
def test_a_host_tier_spares_the_second_computation(host_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence runs out of blocks where a block is full, so all that it had computed is in the tier."""
    engine = tiered_engine(None, host_bytes, num_kv_blocks=24, max_num_sequences=4)
    computed = count_computed(engine, monkeypatch)
    outputs = run_all(engine, [greedy_request(f"{seed}", random_tokens(seed, 20), 60) for seed in range(4)])
    num_needed = 4 * (20 + 59)  # the last token's KV is never wanted
    assert engine.stats().num_preemptions > 2
    assert (sum(computed) == num_needed) == (host_bytes > 0)
    for seed in range(4):
        expected = generate(tiny_engine(), random_tokens(seed, 20), 60)
        assert tokens_of(outputs[f"{seed}"]) == expected
    shut_down(engine)


def test_preempted_through_the_host_tier_equals_no_cache() -> None:
    """The oracle's preempted case with a tier below: every residue × shared prefix keeps its text."""
    plain = tiny_engine(enable_prefix_caching=False)
    cases = CASES[::2]
    engine = tiered_engine(None, 1 << 16, num_kv_blocks=9, max_num_sequences=8)
    outputs = run_all(engine, [greedy_request(f"{case}", prompt_with(*case), 12) for case in cases])
    for case in cases:
        assert tokens_of(outputs[f"{case}"]) == generate(plain, prompt_with(*case), 12)
    assert engine.stats().num_preemptions > 10
    assert engine.stats().tiers["host"].num_hit_tokens > 0
    shut_down(engine)
