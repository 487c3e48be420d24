"""Log-probabilities of the prompt: transformers' own numbers, whatever is cached, cut, or preempted."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_engine_oracle import random_tokens
from engine.test_model_families import reference_model
from engine.test_tiers_engine import EagerPlanner
from engine.tiny_models import engine_like, generate, greedy_request, run_all, tiny_engine, tokens_of
from engine.worker_app import Worker, running_worker, sse_events
from fakes.tiny_checkpoint import write_tiny_checkpoint

from engine_adapter.engine.core.step_output import StepOutput
from engine_adapter.engine.kv.sequence import EngineRequest
from engine_adapter.engine.kv.tiers.tier_config import TierConfig
from engine_adapter.engine.model import prompt_scoring
from engine_adapter.engine.model.sampling import SamplingParams, TokenLogprobs

PROMPT = random_tokens(11, 43)


def scoring_request(name: str, prompt: list[int], num_top: int = 3, **fields: object) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=4, num_prompt_logprobs=num_top)
    return EngineRequest(
        **{"request_id": name, "prompt_token_ids": prompt, "sampling": sampling, **fields}  # type: ignore[arg-type]  # a test's shorthand
    )


def scores_of(outputs: list[StepOutput]) -> list[TokenLogprobs]:
    """The scores, which come once, with the first token."""
    assert [bool(output.prompt_logprobs) for output in outputs] == [True] + [False] * (len(outputs) - 1)
    return outputs[0].prompt_logprobs


def assert_close(actual: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in got.top] == [token for token, _ in wanted.top]


@pytest.fixture(scope="module")
def expected() -> list[TokenLogprobs]:
    """PROMPT scored by one step of an engine without a cache."""
    engine = tiny_engine(enable_prefix_caching=False)
    return scores_of(run_all(engine, [scoring_request("r", PROMPT)])["r"])


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("rows", [64, 5])
def test_scores_are_those_of_transformers(chunk: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """log_softmax of transformers' logits at every position, in one step or many, in any slices of rows."""
    monkeypatch.setattr(prompt_scoring, "SCORED_ROWS", rows)
    reference = reference_model("qwen3")
    engine = engine_like(reference, max_batch_tokens=chunk, max_num_sequences=4)
    prompt = [token % reference.config.vocab_size for token in PROMPT]
    scores = scores_of(run_all(engine, [scoring_request("r", prompt)])["r"])
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference(torch.tensor([prompt])).logits[0, :-1], dim=-1)
    best = torch.topk(logprobs, 3)
    assert len(scores) == len(prompt) - 1
    for position, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(logprobs[position, prompt[position + 1]]), abs=2e-4)
        assert [token for token, _ in score.top] == best.indices[position].tolist()
        torch.testing.assert_close(
            torch.tensor([value for _, value in score.top]), best.values[position], rtol=1e-4, atol=2e-4
        )


def test_a_cached_prompt_is_scored_by_computing_it(expected: list[TokenLogprobs]) -> None:
    """Neither the device's cache nor a tier is used; what it computes, others reuse."""
    engine = tiny_engine(tiers=TierConfig(host_bytes=1 << 18), debug_kv_guards=True)
    engine.tiers.loads.planner = EagerPlanner()
    text = generate(engine, PROMPT, 4)
    for clears in (False, True):
        if clears:
            engine.blocks.clear_cache()
        outputs = run_all(engine, [scoring_request("r", PROMPT)])["r"]
        assert outputs[-1].num_cached_tokens == 0
        assert tokens_of(outputs) == text
        assert_close(scores_of(outputs), expected)
        engine.verify()
    again = run_all(engine, [greedy_request("again", PROMPT, 4)])["again"]
    assert again[-1].num_cached_tokens == 40
    engine.close()


def test_preempted_half_way_nothing_is_scored_twice(expected: list[TokenLogprobs]) -> None:
    """A prompt that is preempted between its chunks goes on, and each position is scored once."""
    engine = tiny_engine(max_batch_tokens=6, max_num_sequences=4)
    engine.add_request(scoring_request("r", PROMPT))
    for _ in range(3):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[-1].num_preemptions == 1
    assert_close(scores_of(outputs), expected)


def test_beside_others(expected: list[TokenLogprobs]) -> None:
    """Scored and sampled rows of one step do not mix up."""
    engine = tiny_engine(num_kv_blocks=256, max_batch_tokens=40)
    others = [greedy_request(f"o{index}", random_tokens(index, 9) * 3, 12) for index in range(3)]
    plain = {request.request_id: generate(tiny_engine(), request.prompt_token_ids, 12) for request in others}
    outputs = run_all(
        engine, [others[0], scoring_request("r", PROMPT), *others[1:], scoring_request("s", [5])]
    )
    assert_close(scores_of(outputs["r"]), expected)
    assert outputs["s"][0].prompt_logprobs == []
    assert {name: tokens_of(outputs[name]) for name in plain} == plain


# -- over HTTP


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with running_worker(write_tiny_checkpoint(tmp_path)) as running:
        yield running


async def choices_of(response: Any) -> list[Any]:
    answer = await response.json()
    assert response.status == 200, answer
    return list(answer["choices"])


async def test_echo_with_logprobs_has_prompt_and_answer(worker: Worker) -> None:
    """Parallel lists over prompt and answer, the first token without a number, offsets into the text."""
    prompt = "abc abd"
    for choice in await choices_of(await worker.complete(prompt, echo=True, logprobs=2, n=2)):
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(prompt)
        num_tokens = len(logprobs["tokens"])
        assert "".join(logprobs["tokens"]).startswith(prompt)
        assert [len(logprobs[key]) for key in ("token_logprobs", "top_logprobs", "text_offset")] == [
            num_tokens
        ] * 3
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert logprobs["text_offset"][:3] == [
            0,
            len(logprobs["tokens"][0]),
            len("".join(logprobs["tokens"][:2])),
        ]
        for token, value, top in zip(
            logprobs["tokens"][1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
        ):
            assert value <= 0
            assert math.isclose(top[token], value, abs_tol=1e-6)


async def test_max_tokens_zero_scores_the_prompt_alone(worker: Worker) -> None:
    """`echo` with `max_tokens: 0`: the prompt, its numbers, no answer; without `echo` zero is refused."""
    response = await worker.complete(["abc", "x"], echo=True, logprobs=0, max_tokens=0)
    answer = await response.json()
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "x"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [3, 1]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0
    assert (await worker.complete("abc", max_tokens=0)).status == 400


async def test_streamed_scores_join_to_the_whole(worker: Worker) -> None:
    """The chunks' lists, put together, are those of the whole answer."""
    fields = {"echo": True, "logprobs": 1, "max_tokens": 12}
    (whole,) = await choices_of(await worker.complete("abc abd", **fields))
    *chunks, _ = sse_events(await (await worker.complete("abc abd", stream=True, **fields)).read())
    for key in ("tokens", "token_logprobs", "text_offset"):
        joined = [item for chunk in chunks for item in chunk["choices"][0]["logprobs"][key]]
        if key == "token_logprobs":  # rounding may differ
            assert joined == pytest.approx(whole["logprobs"][key], abs=1e-4)
        else:
            assert joined == whole["logprobs"][key]
