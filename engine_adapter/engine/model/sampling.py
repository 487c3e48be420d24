"""Chooses one token from a row of logits.

The order: penalties, bias and masks, then temperature, then min_p, top_k and top_p, then one draw by inverse
CDF. Invariants:

* temperature 0 is exactly `argmax`, whatever the other parameters say;
* the random number of step *i* depends only on (seed, i), so a sequence's text does not depend on other
  sequences in the batch or on preemption, and a seed reproduces it in another process;
* reported log-probabilities are those of the model's own distribution, before any of these steps.

It does not know when a sequence ends: the engine and the server check stop tokens, lengths and stop strings.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

GREEDY_BELOW_TEMPERATURE = 1e-5  # vLLM's threshold: smaller temperatures overflow in fp32
CDF_CHUNK = 256  # about the square root of a vocabulary, so that both levels of the draw are short
MAX_TOP_LOGPROBS = 20  # OpenAI's limit


class TokenConstraint(Protocol):
    """What a grammar allows next, for one running sequence."""

    def mask_logits(self, row: torch.Tensor) -> None:
        """Set the logits `(1, vocab)` of forbidden tokens to -inf. Changes: `row`."""

    def accept(self, token_id: int) -> None:
        """Advance past the chosen token. Changes: the position in the grammar."""


class TokenConstraintSource(Protocol):
    """A compiled grammar; `start` returns a new position in it for each sequence."""

    def start(self) -> TokenConstraint: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """A request's sampling parameters and stop tokens.

    `stop_token_ids` holds every id that ends the text, end-of-sequence included. `num_logprobs` is None for
    none, 0 for the chosen token only, n for the n best tokens as well.
    """

    max_tokens: int | None = None  # None: up to the end of the context
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None  # of each prompt token but the first; None: not wanted
    stop_token_ids: frozenset[int] = frozenset()
    constraint: TokenConstraintSource | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probability of the chosen token, and of the best tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """One entry per row of the logits."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class SamplingState:
    """What the sampler remembers of one sequence between steps. Survives a preemption."""

    __slots__ = (
        "constraint",
        "num_sampled",
        "output_counts",
        "params",
        "prompt_logprobs",
        "seed",
        "seen_token_ids",
    )

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        self.params = params
        self.seed = params.seed if params.seed is not None else secrets.randbits(64)
        self.num_sampled = 0
        self.output_counts: dict[int, int] = {}
        self.prompt_logprobs: list[
            TokenLogprobs
        ] = []  # from the prompt's second token on, as far as computed
        # Only repetition_penalty needs the prompt's tokens.
        self.seen_token_ids: set[int] = set(prompt_token_ids) if params.repetition_penalty != 1.0 else set()
        self.constraint = params.constraint.start() if params.constraint is not None else None

    def uniform(self) -> float:
        """The current step's random number in [0, 1): a hash of (seed, step). Changes nothing."""
        digest = hashlib.blake2b(f"{self.seed}:{self.num_sampled}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def accept(self, token_id: int) -> None:
        """Record the chosen token. Changes: the counts and the position in the grammar."""
        self.num_sampled += 1
        if self.params.has_penalties:
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1
            self.seen_token_ids.add(token_id)
        if self.constraint is not None and token_id not in self.params.stop_token_ids:
            self.constraint.accept(token_id)


class Sampler:
    """Chooses one token per row. Stateless: everything remembered is in the sampling states."""

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> SamplerOutput:
        """Choose a token per row.

        Args:
            logits: `(num_sequences, vocab)`, fp32, any device. Changed in place by penalties and masks.
            states: one per row. Changes: each accepts its chosen token.
        """
        assert logits.shape[0] == len(states)
        raw = logits.clone() if _needs_raw_copy(states) else logits
        for row, state in enumerate(states):
            _edit_row(logits[row : row + 1], state)
        token_ids = logits.argmax(dim=-1).tolist()
        drawing = [row for row, state in enumerate(states) if not state.params.is_greedy]
        if drawing:
            drawn = _draw(logits[drawing], [states[row] for row in drawing])
            for row, token_id in zip(drawing, drawn, strict=True):
                token_ids[row] = token_id
        logprobs = [
            _logprobs_of(raw[row], token_ids[row], state.params.num_logprobs)
            for row, state in enumerate(states)
        ]
        for state, token_id in zip(states, token_ids, strict=True):
            state.accept(token_id)
        return SamplerOutput(token_ids=token_ids, logprobs=logprobs)


def _needs_raw_copy(states: Sequence[SamplingState]) -> bool:
    return any(state.params.num_logprobs is not None for state in states)


def _edit_row(row: torch.Tensor, state: SamplingState) -> None:
    """Apply penalties, bias, minimum length and grammar. Changes: one row `(1, vocab)`."""
    params = state.params
    if params.has_penalties:
        _apply_penalties(row[0], state)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[0, ids] += torch.tensor(list(params.logit_bias.values()), device=row.device, dtype=row.dtype)
    if state.constraint is not None:
        state.constraint.mask_logits(row)  # may leave only stop tokens, so min_tokens does not apply
    elif state.num_sampled < params.min_tokens and params.stop_token_ids:
        row[0, torch.tensor(sorted(params.stop_token_ids), device=row.device)] = -torch.inf


def _apply_penalties(row: torch.Tensor, state: SamplingState) -> None:
    """Repetition (prompt and output) scales as in CTRL; presence and frequency (output) subtract."""
    params = state.params
    if state.seen_token_ids and params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(state.seen_token_ids), device=row.device)
        values = row[seen]
        scale = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / scale, values * scale)
    if state.output_counts:
        ids = torch.tensor(list(state.output_counts), device=row.device)
        counts = torch.tensor(list(state.output_counts.values()), device=row.device, dtype=row.dtype)
        row[ids] -= counts * params.frequency_penalty + params.presence_penalty


def _draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Draw one token id per row of edited logits `(n, vocab)`. Changes nothing."""
    device = logits.device
    temperature = torch.tensor([state.params.temperature for state in states], device=device)
    probabilities = torch.softmax(logits / temperature[:, None], dim=-1)
    min_p = torch.tensor([state.params.min_p for state in states], device=device)
    if any(state.params.min_p > 0 for state in states):
        floor = probabilities.amax(dim=-1, keepdim=True) * min_p[:, None]
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    uniforms = torch.tensor([state.uniform() for state in states], device=device, dtype=torch.float64)
    chosen = [0] * len(states)
    cut = [row for row, state in enumerate(states) if state.params.top_k > 0 or state.params.top_p < 1.0]
    for row in cut:  # one by one, because the candidate sets differ in size
        params = states[row].params
        weights, ids = _candidates(probabilities[row], params.top_k, params.top_p)
        chosen[row] = int(ids[_inverse_cdf(weights[None], uniforms[row : row + 1])[0]])
    whole = sorted(set(range(len(states))) - set(cut))
    if whole:
        drawn = _inverse_cdf(probabilities[whole], uniforms[whole]).tolist()
        for row, token_id in zip(whole, drawn, strict=True):
            chosen[row] = token_id
    return chosen


def _candidates(probabilities: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that pass top_k and then top_p, best first: `(probabilities, token_ids)`.

    top_p keeps the shortest prefix of what top_k has left whose sum reaches it. Without top_k, only tokens
    above a floor are sorted: all those below `(1 - top_p) / vocab` together have less than `1 - top_p`, so
    the prefix never reaches them. A full sort of 49k probabilities would take 4 ms on a core.
    """
    vocab = probabilities.shape[-1]
    if top_k > 0:
        values, ids = torch.topk(probabilities, min(top_k, vocab))
        values = values / values.sum()
    else:
        floor = 0.5 * (1.0 - top_p) / vocab  # half of it, because a softmax does not sum to exactly 1
        above = (probabilities >= floor).nonzero()[:, 0]
        values, order = torch.sort(probabilities[above], descending=True, stable=True)
        ids = above[order]
    before = values.cumsum(-1) - values  # sum of the better candidates
    num_kept = max(int((before < top_p).sum()), 1)
    return values[:num_kept], ids[:num_kept]


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return one index per row of `(n, m)` unnormalised weights, by their running sum.

    Uses two levels, chunk and token within it, because a running sum of 49k values in fp64 takes ten times as
    long as their plain sum. fp64 because fp32 is not precise enough for a running sum of 49k small terms.
    """
    num_rows, num_weights = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -num_weights % CDF_CHUNK))
    chunks = padded.view(num_rows, -1, CDF_CHUNK)
    sums = chunks.sum(dim=-1, dtype=torch.float64)
    cumulative = sums.cumsum(dim=-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    chunk = torch.searchsorted(cumulative, targets, right=True).clamp(max=sums.shape[-1] - 1)
    rest = targets - (cumulative.gather(1, chunk) - sums.gather(1, chunk))
    rows = torch.arange(num_rows, device=weights.device)
    inner = chunks[rows, chunk[:, 0]].double().cumsum(dim=-1)
    index = torch.searchsorted(inner, rest, right=True).clamp(max=CDF_CHUNK - 1)
    return (chunk * CDF_CHUNK + index).clamp(max=num_weights - 1)[:, 0]


def _logprobs_of(row: torch.Tensor, token_id: int, num_logprobs: int | None) -> TokenLogprobs | None:
    if num_logprobs is None:
        return None
    logprobs = torch.log_softmax(row.float(), dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if num_logprobs > 0:
        values, ids = torch.topk(logprobs, min(num_logprobs, logprobs.shape[-1]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(logprob=float(logprobs[token_id]), top=top)
