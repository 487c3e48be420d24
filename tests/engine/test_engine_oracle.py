"""Output with reuse equals output without: the oracle over lengths, shared prefixes and circumstances.

The reference engine has caching off and runs one request at a time. fp32 throughout, greedy, token-identical.
"""

from __future__ import annotations

import random

import pytest
from engine.tiny_models import generate, greedy_request, run_all, tiny_engine, tokens_of

from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.sequence import EngineRequest
from engine_adapter.engine.model.sampling import SamplingParams

BLOCK_SIZE = 4
NUM_OUTPUT_TOKENS = 4
LENGTHS = range(1, 4 * BLOCK_SIZE + 4)  # every residue, up to four blocks and three tokens
SHARED = (0, 3, 4, 5, 8, 11, 16)


def random_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(97), k=count)


COMMON = random_tokens(1, 40)


def prompt_with(shared: int, length: int) -> list[int]:
    """A prompt of `length` tokens that shares exactly its first `shared` tokens with COMMON."""
    own = random_tokens(1000 * shared + length, length)
    if shared < length:
        own[shared] = (COMMON[shared] + 1) % 97
    return COMMON[:shared] + own[shared:]


CASES = [(shared, length) for length in LENGTHS for shared in SHARED if shared <= length]


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], list[int]]:
    """What an engine without a cache answers, case by case."""
    engine = tiny_engine(enable_prefix_caching=False)
    return {case: generate(engine, prompt_with(*case), NUM_OUTPUT_TOKENS) for case in CASES}


def warm_up(engine: LLMEngine) -> None:
    generate(engine, COMMON, NUM_OUTPUT_TOKENS)


def reusable_tokens(shared: int, length: int) -> int:
    """Full blocks of the shared prefix, never the last token."""
    return min(shared, length - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_the_oracle_can_fail(expected: dict[tuple[int, int], list[int]]) -> None:
    """The tiny model's text depends on the shared prefix: swapping it changes the answer."""
    engine = tiny_engine(enable_prefix_caching=False)
    changed = 0
    for shared, length in [(8, 10), (11, 15), (16, 19)]:
        prompt = prompt_with(shared, length)
        other = [(token + 5) % 97 for token in prompt[:4]] + prompt[4:]
        changed += generate(engine, other, NUM_OUTPUT_TOKENS) != expected[shared, length]
    assert changed == 3


def test_corrupted_cached_block_changes_the_text(expected: dict[tuple[int, int], list[int]]) -> None:
    """The hit path really reads the cached blocks: overwriting one changes what follows."""
    engine = tiny_engine()
    warm_up(engine)
    victims = engine.blocks.pool.cached_in_eviction_order()
    for block_id in victims:
        engine.storage.write_block(block_id, bytes(engine.storage.block_bytes))
    assert generate(engine, prompt_with(16, 19), NUM_OUTPUT_TOKENS) != expected[16, 19]


def test_cold_then_warm_equal_no_cache(expected: dict[tuple[int, int], list[int]]) -> None:
    """Cold, warm and fully warm runs give the reference text, and reuse exactly the full shared blocks."""
    check_cold_then_warm(expected, CASES, tiny_engine(num_kv_blocks=2048))


def test_chunks_across_block_borders_equal_no_cache(expected: dict[tuple[int, int], list[int]]) -> None:
    """The same with prompts worked off five tokens at a time, so that chunks end inside blocks."""
    engine = tiny_engine(num_kv_blocks=2048, max_batch_tokens=5, max_num_sequences=5)
    check_cold_then_warm(expected, CASES[::3], engine)


def check_cold_then_warm(
    expected: dict[tuple[int, int], list[int]], cases: list[tuple[int, int]], engine: LLMEngine
) -> None:
    """Run each case under its own salt: after COMMON, and then once more."""
    for case in cases:
        salt, prompt = f"{case}", prompt_with(*case)
        generate(engine, COMMON, NUM_OUTPUT_TOKENS, cache_salt=salt)
        for reused in (reusable_tokens(*case), reusable_tokens(case[1], case[1])):
            request = greedy_request("r", prompt, NUM_OUTPUT_TOKENS, cache_salt=salt)
            outputs = run_all(engine, [request])["r"]
            assert tokens_of(outputs) == expected[case]
            assert outputs[-1].num_cached_tokens == reused
    engine.verify()


def test_after_partial_eviction_equals_no_cache(expected: dict[tuple[int, int], list[int]]) -> None:
    """With the tail of the shared prefix evicted, what is left is reused and the text is the same."""
    engine = tiny_engine(num_kv_blocks=14)
    for case in CASES:
        warm_up(engine)
        filler = random_tokens(case[1] * 31 + case[0], 25)
        generate(engine, filler, 3)
        outputs = run_all(engine, [greedy_request("r", prompt_with(*case), NUM_OUTPUT_TOKENS)])["r"]
        assert tokens_of(outputs) == expected[case]
        assert outputs[-1].num_cached_tokens <= reusable_tokens(*case)
        engine.verify()
    assert engine.stats().num_evictions > 0


def test_after_failed_admission_equals_no_cache(expected: dict[tuple[int, int], list[int]]) -> None:
    """A request that matched, found no room, and is admitted after its prefix was evicted, is still right."""
    engine = tiny_engine(num_kv_blocks=16)
    for case in CASES:
        warm_up(engine)
        hog = random_tokens(case[1] * 7 + case[0] + 5000, 50)
        engine.add_request(greedy_request("hog", hog, 5))
        engine.step()
        engine.add_request(greedy_request("late", prompt_with(*case), NUM_OUTPUT_TOKENS))
        outputs = []
        while engine.has_work:
            outputs += [output for output in engine.step() if output.request_id == "late"]
        assert tokens_of(outputs) == expected[case]
        engine.verify()


def test_batched_with_others_equals_no_cache(expected: dict[tuple[int, int], list[int]]) -> None:
    """All cases at once, sharing prefixes that others are computing, give each its own text."""
    engine = tiny_engine(num_kv_blocks=600, max_num_sequences=64, max_batch_tokens=96)
    requests = [greedy_request(f"{case}", prompt_with(*case), NUM_OUTPUT_TOKENS) for case in CASES]
    outputs = run_all(engine, requests)
    for case in CASES:
        assert tokens_of(outputs[f"{case}"]) == expected[case]
    engine.verify()


def test_preempted_equals_no_cache(expected: dict[tuple[int, int], list[int]]) -> None:
    """With too few blocks for all, sequences are preempted and recomputed, and no text changes."""
    engine = tiny_engine(num_kv_blocks=9, max_num_sequences=8)
    requests = [greedy_request(f"{case}", prompt_with(*case), 3 * BLOCK_SIZE) for case in CASES]
    outputs = run_all(engine, requests)
    for case in CASES:
        assert tokens_of(outputs[f"{case}"])[:NUM_OUTPUT_TOKENS] == expected[case]
    preempted = [case for case in CASES if outputs[f"{case}"][-1].num_preemptions]
    assert len(preempted) > 10
    engine.verify()


def test_after_abort_mid_prefill_and_stop_mid_block_equals_no_cache(
    expected: dict[tuple[int, int], list[int]],
) -> None:
    """KV of an aborted prompt or of a text stopped inside a block never enters another's context."""
    engine = tiny_engine(num_kv_blocks=40, max_batch_tokens=32, max_prefill_tokens_beside_decodes=5)
    first = generate(tiny_engine(), COMMON, NUM_OUTPUT_TOKENS)
    for case in CASES:
        engine.add_request(greedy_request("aborted", COMMON, NUM_OUTPUT_TOKENS))
        engine.step()
        engine.abort("aborted")
        stops = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=frozenset({first[2]}))
        run_all(engine, [EngineRequest(request_id="stops", prompt_token_ids=COMMON, sampling=stops)])
        assert generate(engine, prompt_with(*case), NUM_OUTPUT_TOKENS) == expected[case]
        engine.verify()


def test_next_turn_reuses_what_the_last_turn_generated() -> None:
    """A chat that sends its history back reuses prompt and answer blocks, with the text of a cold run."""
    engine, reference = tiny_engine(), tiny_engine(enable_prefix_caching=False)
    history = random_tokens(9, 7)
    previous = 0
    for turn in range(6):
        outputs = run_all(engine, [greedy_request("t", history, 7)])["t"]
        answer = tokens_of(outputs)
        assert answer == generate(reference, history, 7)
        if turn:
            # All tokens of the last turn have KV except its last one.
            assert outputs[-1].num_cached_tokens == (previous - 1) // BLOCK_SIZE * BLOCK_SIZE
        previous = len(history) + len(answer)
        history = history + answer + random_tokens(turn, 5)
