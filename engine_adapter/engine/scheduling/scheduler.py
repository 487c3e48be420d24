"""What the next step computes: which sequences, and how many tokens of each.

One step has a budget of tokens. Decodes come first, one token each, so that nobody's stream pauses for a
newcomer. What is left goes to prompts in chunks; beside running decodes that share is smaller, since every
decode waits for the whole step. Between prompts the oldest gets half the chunk budget and the one with
least to do the rest: short follow-ups overtake a long first turn, and the long one still always advances.

A waiting sequence is admitted when its whole prompt fits beside room for the running ones to grow, so two
prompts never block each other half way. If a running one still cannot grow, the running sequence of the
greatest rank is preempted: its blocks go back (named ones stay cached) and it is recomputed later. The best
ranked sequence always advances, hence every sequence ends; one that is alone and full ends with `length`.

Single-threaded. Knows no torch, no tokens' meaning and no clock: time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine_adapter.engine.kv.block_manager import BlockManager
from engine_adapter.engine.kv.sequence import FinishReason, Sequence, SequenceStatus
from engine_adapter.engine.scheduling.step_pace import StepPace
from engine_adapter.engine.scheduling.waiting_queue import WaitingQueue


class QueueFull(Exception):
    """As many requests wait as the engine is configured to let wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queue."""

    max_batch_tokens: int = 512
    max_prefill_tokens_beside_decodes: int = 128
    max_step_s: float | None = None  # prompts get fewer tokens per step where it would take longer
    max_num_sequences: int = 32
    max_num_waiting: int = 1024

    def __post_init__(self) -> None:
        if self.max_num_sequences < 1:
            raise ValueError("max_num_sequences must be at least 1")
        if self.max_batch_tokens < self.max_num_sequences:
            raise ValueError(
                f"max_batch_tokens {self.max_batch_tokens} is less than max_num_sequences "
                f"{self.max_num_sequences}: a step must have room for one token of each"
            )
        if self.max_prefill_tokens_beside_decodes < 1:
            raise ValueError("max_prefill_tokens_beside_decodes must be at least 1")
        if self.max_step_s is not None and self.max_step_s <= 0:
            raise ValueError("max_step_s must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """One sequence's part of a step: compute `num_new_tokens` tokens from `num_computed_tokens` on."""

    sequence: Sequence
    num_new_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last known token, so that its logits give the next one."""
        return self.sequence.num_computed_tokens + self.num_new_tokens == self.sequence.num_tokens

    @property
    def scored_positions(self) -> range:
        """Positions of this step whose logits tell the log-probability of the prompt token behind them."""
        sequence = self.sequence
        if not sequence.scores_prompt:
            return range(0)
        start = max(sequence.num_computed_tokens, len(sequence.sampling_state.prompt_logprobs))
        end = min(sequence.num_computed_tokens + self.num_new_tokens, sequence.num_prompt_tokens - 1)
        return range(start, end)


@dataclass(slots=True, kw_only=True)
class ScheduledBatch:
    """All that one step does, and the sequences that ended while it was planned."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of sequences that are not decoding."""
        return sum(item.num_new_tokens for item in self.scheduled if not item.sequence.is_decoding)


class Scheduler:
    """Waiting and running sequences over one block manager."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        *,
        on_admitted: Callable[[Sequence], None] | None = None,
    ) -> None:
        """Schedule over an unused block manager.

        Args:
            on_admitted: called with each sequence that got its blocks; may set `Sequence.load_id`.
        """
        self.config = config
        self.blocks = blocks
        self.pace = StepPace(config.max_step_s)
        self._on_admitted = on_admitted
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            QueueFull: too many wait already.
        """
        if len(self.waiting) >= self.config.max_num_waiting:
            raise QueueFull(f"{len(self.waiting)} requests are waiting already")
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence wherever it is and free all it holds."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.blocks.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def schedule(self, now_s: float) -> ScheduledBatch:
        """Plan one step. Changes: admits, preempts, allocates blocks, ends what cannot go on."""
        batch = ScheduledBatch()
        self._expire(now_s, batch)
        num_preemptions_before = self.num_preemptions
        self._schedule_decodes(batch)
        if self.num_preemptions == num_preemptions_before:
            self._admit(now_s, batch)
        self._schedule_prefills(batch)
        for item in batch.scheduled:
            self.waiting.charge(item.sequence.request.cache_salt, item.num_new_tokens)
        return batch

    def observe_step(self, batch: ScheduledBatch, elapsed_s: float) -> None:
        """Learn how long a step took. Changes: how many prompt tokens the next one may take."""
        num_prompt_tokens = batch.num_prompt_tokens
        has_decodes = batch.num_tokens > num_prompt_tokens
        self.pace.record(num_prompt_tokens, elapsed_s, has_decodes=has_decodes)

    def _expire(self, now_s: float, batch: ScheduledBatch) -> None:
        for sequence in list(self.waiting):
            deadline_s = sequence.request.deadline_s
            if deadline_s is not None and now_s >= deadline_s and sequence.num_output_tokens == 0:
                self.finish(sequence, FinishReason.TIMEOUT)
                batch.finished.append(sequence)

    def _schedule_decodes(self, batch: ScheduledBatch) -> None:
        # Best rank first: victims are taken from the other end, so nobody scheduled here is preempted.
        for sequence in sorted(self.running, key=lambda item: item.rank):
            if sequence.status is not SequenceStatus.RUNNING or not sequence.is_decoding:
                continue
            if self._make_room(sequence, batch):
                batch.scheduled.append(ScheduledSequence(sequence=sequence, num_new_tokens=1))

    def _make_room(self, sequence: Sequence, batch: ScheduledBatch) -> bool:
        """Grow by one token, preempting the greatest rank until it fits or it is its own turn."""
        while not self.blocks.grow(sequence, sequence.num_tokens):
            victim = max(self.running, key=lambda item: item.rank)
            if victim is sequence and len(self.running) == 1:
                self.finish(sequence, FinishReason.LENGTH)
                batch.finished.append(sequence)
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.free(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(sequence)

    def _admit(self, now_s: float, batch: ScheduledBatch) -> None:
        """Move waiting sequences to running while places and blocks last."""
        for sequence in self.waiting:
            if len(self.running) >= self.config.max_num_sequences:
                break
            matched = self.blocks.match_prefix(sequence)
            if self.blocks.waits_for_another(sequence, len(matched)):
                continue  # cheaper to reuse in a moment than to compute the same now
            if not self.blocks.admit(sequence, matched, num_spare=len(self.running)):
                if self.running:
                    break  # in order: a small one behind must not starve the big one in front
                self.finish(sequence, FinishReason.CAPACITY)
                batch.finished.append(sequence)
                continue
            self.waiting.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            if sequence.timings.first_scheduled_s is None:
                sequence.timings.first_scheduled_s = now_s
            self.running.append(sequence)
            if self._on_admitted is not None:
                self._on_admitted(sequence)

    def _schedule_prefills(self, batch: ScheduledBatch) -> None:
        """Share what is left of the budget between sequences that have no decode in this step."""
        budget = self.config.max_batch_tokens - batch.num_tokens
        if batch.scheduled:
            budget = min(budget, self.config.max_prefill_tokens_beside_decodes)
        budget = self.pace.cap(budget, has_decodes=bool(batch.scheduled))
        decoding = {item.sequence.request_id for item in batch.scheduled}
        prompts = [item for item in self.running if item.request_id not in decoding and item.load_id is None]
        for sequence, num_new_tokens in share_prefill_budget(prompts, budget):
            batch.scheduled.append(ScheduledSequence(sequence=sequence, num_new_tokens=num_new_tokens))


def share_prefill_budget(prompts: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Split a chunk budget: half to the best ranked, the rest by least remaining work. Changes nothing.

    The half keeps the oldest from starving; shortest-first minimises the mean wait of the others. Shares
    that would be zero are left out.
    """
    if not prompts or budget <= 0:
        return []
    oldest = min(prompts, key=lambda item: item.rank)
    shares = {oldest.request_id: min(oldest.num_uncomputed_tokens, -(-budget // 2))}
    left = budget - shares[oldest.request_id]
    by_work = sorted(prompts, key=lambda item: (item.num_uncomputed_tokens, item.rank))
    for sequence in by_work:
        share = shares.get(sequence.request_id, 0)
        extra = min(left, sequence.num_uncomputed_tokens - share)
        shares[sequence.request_id] = share + extra
        left -= extra
    return [(item, shares[item.request_id]) for item in prompts if shares[item.request_id] > 0]
