"""Sampling: greedy exactness, reproducible draws, cuts, penalties, reported log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.engine.model.sampling import Sampler, SamplingParams, SamplingState, _inverse_cdf

VOCAB = 40


def random_logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample_one(logits: torch.Tensor, **params: Any) -> int:
    state = SamplingState(SamplingParams(**params))
    return Sampler().sample(logits.clone(), [state]).token_ids[0]


@given(st.integers(0, 2**31), st.floats(0.01, 1.0), st.integers(0, VOCAB), st.floats(0, 1))
def test_temperature_zero_is_argmax(seed: int, top_p: float, top_k: int, min_p: float) -> None:
    """Greedy ignores every parameter of the draw."""
    logits = random_logits(1, seed)
    chosen = sample_one(logits, temperature=0.0, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    assert chosen == int(logits.argmax())


@given(st.integers(0, 2**31), st.floats(0.05, 1.0), st.integers(0, VOCAB), st.floats(0, 0.5))
def test_drawn_token_is_in_the_allowed_set(seed: int, top_p: float, top_k: int, min_p: float) -> None:
    """A draw stays within min_p, then top_k, then the shortest head that reaches top_p."""
    logits = random_logits(1, seed)
    chosen = sample_one(logits, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    probabilities = torch.softmax(logits[0].double(), dim=-1)
    allowed = probabilities >= probabilities.max() * min_p * (1 - 1e-6)
    kept = sorted((float(p), i) for i, p in enumerate(probabilities) if allowed[i])[::-1]
    kept = kept[:top_k] if top_k else kept
    total, mass = sum(p for p, _ in kept), 0.0
    nucleus: set[int] = set()
    for p, i in kept:
        if mass > top_p * total + 1e-6 and nucleus:
            break
        nucleus.add(i)
        mass += p
    assert chosen in nucleus


def test_a_flat_nucleus_is_long() -> None:
    """With a flat distribution top_p = 0.9 keeps 90 % of the vocabulary."""
    logits = torch.zeros(1, 2000)
    chosen = {sample_one(logits, top_p=0.9, seed=seed) for seed in range(600)}
    assert len(chosen) > 350


@given(st.lists(st.integers(0, 5), min_size=1, max_size=600).filter(any), st.floats(0, 1, exclude_max=True))
def test_the_draw_inverts_the_running_sum(weights: list[int], uniform: float) -> None:
    """The chosen index is the first whose running sum exceeds the random share; it never has weight 0."""
    tensor = torch.tensor([weights], dtype=torch.float32)
    index = int(_inverse_cdf(tensor, torch.tensor([uniform], dtype=torch.float64))[0])
    target = uniform * sum(weights)
    assert weights[index] > 0
    assert sum(weights[:index]) <= target < sum(weights[: index + 1])


def test_draws_follow_the_distribution() -> None:
    """4,000 seeded draws at temperature 1 match the softmax within five standard deviations."""
    logits = random_logits(1, 3, vocab=6)
    counts = Counter(sample_one(logits, seed=seed) for seed in range(4000))
    for token_id, p in enumerate(torch.softmax(logits[0], -1).tolist()):
        assert abs(counts[token_id] / 4000 - p) < 5 * math.sqrt(p * (1 - p) / 4000) + 1e-3


@settings(max_examples=30)
@given(st.integers(0, 2**63), st.integers(0, 4), st.sampled_from([1.0, 0.8]))
def test_a_seeded_sequence_does_not_depend_on_its_neighbours(seed: int, position: int, top_p: float) -> None:
    """The same seed and step give the same token alone and inside any batch."""
    logits = random_logits(5, 1)
    states = [SamplingState(SamplingParams(seed=7 * row, top_k=row)) for row in range(5)]
    params = SamplingParams(seed=seed, top_p=top_p)
    states[position] = SamplingState(params)
    together = Sampler().sample(logits.clone(), states).token_ids[position]
    alone = Sampler().sample(logits[position : position + 1].clone(), [SamplingState(params)]).token_ids[0]
    assert together == alone


def test_successive_steps_use_different_randomness() -> None:
    """A seeded sequence does not repeat one draw for ever."""
    state = SamplingState(SamplingParams(seed=1))
    tokens = {Sampler().sample(torch.zeros(1, VOCAB), [state]).token_ids[0] for _ in range(30)}
    assert len(tokens) > 10


def test_requests_without_a_seed_differ() -> None:
    """Two unseeded states draw from different random streams."""
    assert SamplingState(SamplingParams()).seed != SamplingState(SamplingParams()).seed


def test_repetition_penalty_scales_prompt_and_output_tokens() -> None:
    """A positive logit of a seen token is divided, a negative one multiplied."""
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    state = SamplingState(SamplingParams(temperature=0.0, repetition_penalty=2.0), prompt_token_ids=[0, 2])
    assert Sampler().sample(logits, [state]).token_ids == [1]
    assert logits[0].tolist() == pytest.approx([1.0, 1.9, -2.0])


def test_presence_and_frequency_count_output_only() -> None:
    """Prompt tokens are not penalised; two outputs of a token cost presence + 2 × frequency."""
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    state = SamplingState(params, prompt_token_ids=[1])
    for _ in range(2):
        Sampler().sample(torch.tensor([[5.0, 0.0]]), [state])
    logits = torch.tensor([[5.0, 4.5]])
    assert Sampler().sample(logits, [state]).token_ids == [1]
    assert logits[0].tolist() == pytest.approx([4.0, 4.5])


def test_logit_bias_can_force_and_forbid() -> None:
    """+100 forces a token, -100 forbids it, greedy or not."""
    logits = random_logits(1, 5)
    best = int(logits.argmax())
    assert sample_one(logits, temperature=0.0, logit_bias={best: -100.0}) != best
    assert sample_one(logits, logit_bias={3: 100.0}) == 3


def test_min_tokens_forbids_the_stop_ids_until_reached() -> None:
    """The stop id wins only after min_tokens tokens."""
    state = SamplingState(SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=frozenset({1})))
    row = torch.tensor([[0.0, 9.0, 1.0]])
    chosen = [Sampler().sample(row.clone(), [state]).token_ids[0] for _ in range(3)]
    assert chosen == [2, 2, 1]


def test_logprobs_are_those_of_the_unedited_distribution() -> None:
    """Penalties, bias and temperature do not change the reported log-probabilities."""
    logits = random_logits(1, 9)
    expected = torch.log_softmax(logits[0], -1)
    params = SamplingParams(temperature=0.3, logit_bias={4: 100.0}, num_logprobs=3)
    output = Sampler().sample(logits.clone(), [SamplingState(params)])
    assert output.token_ids == [4]
    reported = output.logprobs[0]
    assert reported is not None
    assert reported.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    assert [token_id for token_id, _ in reported.top] == expected.topk(3).indices.tolist()


def test_only_those_who_ask_get_logprobs() -> None:
    """In one batch, logprobs come for the requests that asked."""
    states = [SamplingState(SamplingParams(num_logprobs=0)), SamplingState(SamplingParams())]
    output = Sampler().sample(random_logits(2), states)
    assert output.logprobs[0] is not None
    assert output.logprobs[0].top == ()
    assert output.logprobs[1] is None


class EvenTokensOnly:
    """A grammar that allows even ids; it is its own source and remembers what was accepted."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def start(self) -> EvenTokensOnly:
        return self

    def mask_logits(self, row: torch.Tensor) -> None:
        row[:, 1::2] = -torch.inf

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


def test_a_constraint_masks_and_follows_the_text() -> None:
    """Forbidden tokens are never drawn, and each chosen token moves the grammar on."""
    grammar = EvenTokensOnly()
    state = SamplingState(SamplingParams(temperature=2.0, constraint=grammar, seed=0))
    chosen = [Sampler().sample(torch.zeros(1, VOCAB), [state]).token_ids[0] for _ in range(20)]
    assert all(token_id % 2 == 0 for token_id in chosen)
    assert grammar.accepted == chosen
