"""Turns a scheduled batch into tensors, runs the model, and hands the wanted logits to the sampler.

The runner owns the model and the KV arena and has no opinion: it computes exactly what was scheduled, at the
positions and blocks that the sequences say. It changes KV memory and sampling states, never a sequence.
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
class SampledTokens:
    """New tokens of one sequence: one, or more where drafts were right."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class ModelRunner:
    """One model over one KV storage."""

    def __init__(self, model: LlamaModel, storage: KVStorage) -> None:
        self._model = model
        self._storage = storage
        self._sampler = Sampler()

    @torch.inference_mode()
    def run(self, scheduled: list[ScheduledSequence]) -> list[SampledTokens | None]:
        """Compute one step; an entry is None where the sequence did not reach its last token.

        Changes: KV memory, and the sampling states of sequences that get tokens or prompt scores.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        sampled_rows: list[int] = []
        scored_rows: list[int] = []
        for item in scheduled:
            sequence, start = item.sequence, item.sequence.num_computed_tokens
            known_end = start + item.num_new_tokens
            scored_rows.extend(len(token_ids) + position - start for position in item.scored_positions)
            token_ids.extend(sequence.token_ids[start:known_end])
            token_ids.extend(item.draft_token_ids)
            end = known_end + len(item.draft_token_ids)
            positions.extend(range(start, end))
            if item.samples:
                sampled_rows.extend(range(len(token_ids) - len(item.draft_token_ids) - 1, len(token_ids)))
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
        query_lens = [item.num_new_tokens + len(item.draft_token_ids) for item in scheduled]
        starts = [item.sequence.num_computed_tokens for item in scheduled]
        return AttentionBatch.build(
            query_lens=query_lens,
            context_lens=[start + length for start, length in zip(starts, query_lens, strict=True)],
            block_tables=[item.sequence.block_table for item in scheduled],
            block_size=self._storage.block_size,
        )

    def _score_prompts(self, scheduled: list[ScheduledSequence], hidden: torch.Tensor) -> None:
        """Changes: the sampling states whose prompt positions are the rows of `hidden`."""
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

    def _sample(self, scheduled: list[ScheduledSequence], logits: torch.Tensor) -> list[SampledTokens | None]:
        """Sample each sequence's rows in order, going on to the next row while the draft was right.

        A draft token is kept only if the sampler, with the state and the random number of that very step,
        chooses it itself: the text is the one that would have come without drafts.
        """
        results: list[SampledTokens | None] = [
            SampledTokens(token_ids=[], logprobs=[]) if item.samples else None for item in scheduled
        ]
        first_rows = _first_logit_rows(scheduled)
        active = [index for index, item in enumerate(scheduled) if item.samples]
        depth = 0
        while active:
            rows = torch.tensor([first_rows[index] + depth for index in active], device=logits.device)
            states = [scheduled[index].sequence.sampling_state for index in active]
            chosen = self._sampler.sample(logits.index_select(0, rows), states)
            following: list[int] = []
            for index, token_id, logprob in zip(active, chosen.token_ids, chosen.logprobs, strict=True):
                result = results[index]
                assert result is not None
                result.token_ids.append(token_id)
                result.logprobs.append(logprob)
                if _goes_on(scheduled[index], token_id, depth):
                    following.append(index)
            active, depth = following, depth + 1
        return results


def _first_logit_rows(scheduled: list[ScheduledSequence]) -> list[int]:
    rows, next_row = [], 0
    for item in scheduled:
        rows.append(next_row)
        next_row += 1 + len(item.draft_token_ids) if item.samples else 0
    return rows


def _goes_on(item: ScheduledSequence, token_id: int, depth: int) -> bool:
    """Whether the row after `depth` holds a valid distribution: the draft there was chosen, and no stop."""
    drafts = item.draft_token_ids
    ends = token_id in item.sequence.request.sampling.stop_token_ids
    return depth < len(drafts) and drafts[depth] == token_id and not ends
