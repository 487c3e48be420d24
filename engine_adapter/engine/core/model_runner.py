"""Turns a scheduled batch into tensors, runs the model, and passes the requested logits to the sampler.

The runner decides nothing: it computes exactly what was scheduled, at the positions and blocks that the
sequences name. It changes KV memory and sampling states, never a sequence. It lives in `core` because it is
where scheduling, KV memory and the model meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_adapter.engine.kv.kv_storage import KVStorage
from engine_adapter.engine.model.model import LlamaModel
from engine_adapter.engine.model.prompt_scoring import score_rows
from engine_adapter.engine.model.sampling import Sampler, TokenLogprobs
from engine_adapter.engine.scheduling.scheduler import ScheduledSequence
from paged_kv.batch import AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """The new token of one sequence."""

    token_id: int
    logprobs: TokenLogprobs | None


class ModelRunner:
    """One model over one KV storage."""

    def __init__(self, model: LlamaModel, storage: KVStorage) -> None:
        self._model = model
        self._storage = storage
        self._sampler = Sampler()

    @torch.inference_mode()
    def run(self, scheduled: list[ScheduledSequence]) -> list[SampledToken | None]:
        """Compute one step; an entry is None where the sequence has not reached its last token.

        Changes: KV memory, and the sampling states of sequences that get a token or prompt scores.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        sampled_rows: list[int] = []
        scored_rows: list[int] = []
        for item in scheduled:
            sequence, start = item.sequence, item.sequence.num_computed_tokens
            end = start + item.num_new_tokens
            scored_rows.extend(len(token_ids) + position - start for position in item.scored_positions)
            token_ids.extend(sequence.token_ids[start:end])
            positions.extend(range(start, end))
            if item.samples:
                sampled_rows.append(len(token_ids) - 1)
        device = self._model.device
        rows = sampled_rows + scored_rows
        hidden = self._model.hidden_rows(
            torch.tensor(token_ids, device=device),
            torch.tensor(positions, device=device),
            self._attention_batch(scheduled),
            self._storage.layers,
            torch.tensor(rows, device=device) if rows else None,
        )
        if hidden is None:
            return [None] * len(scheduled)
        self._score_prompts(scheduled, hidden[len(sampled_rows) :])
        if not sampled_rows:
            return [None] * len(scheduled)
        return self._sample(scheduled, self._model.logits(hidden[: len(sampled_rows)]))

    def _attention_batch(self, scheduled: list[ScheduledSequence]) -> AttentionBatch:
        query_lens = [item.num_new_tokens for item in scheduled]
        starts = [item.sequence.num_computed_tokens for item in scheduled]
        return AttentionBatch.build(
            query_lens=query_lens,
            context_lens=[start + length for start, length in zip(starts, query_lens, strict=True)],
            block_tables=[item.sequence.block_table for item in scheduled],
            block_size=self._storage.block_size,
        )

    def _score_prompts(self, scheduled: list[ScheduledSequence], hidden: torch.Tensor) -> None:
        """Score the prompt positions in `hidden`. Changes: the sampling states they belong to."""
        start = 0
        for item in scheduled:
            positions, sequence = item.scored_positions, item.sequence
            num_top = sequence.request.sampling.num_prompt_logprobs
            if num_top is None or not positions:
                continue
            following = sequence.token_ids[positions.start + 1 : positions.stop + 1]
            rows = hidden[start : start + len(following)]
            sequence.sampling_state.prompt_logprobs.extend(
                score_rows(rows, self._model.logits, following, num_top)
            )
            start += len(following)

    def _sample(self, scheduled: list[ScheduledSequence], logits: torch.Tensor) -> list[SampledToken | None]:
        """Sample one token per row of `logits`, in the order of the sequences that sample."""
        states = [item.sequence.sampling_state for item in scheduled if item.samples]
        chosen = self._sampler.sample(logits, states)
        tokens = iter(zip(chosen.token_ids, chosen.logprobs, strict=True))
        results: list[SampledToken | None] = []
        for item in scheduled:
            if not item.samples:
                results.append(None)
                continue
            token_id, logprobs = next(tokens)
            results.append(SampledToken(token_id=token_id, logprobs=logprobs))
        return results
