"""Decides what the next step computes: which sequences, and how many tokens of each.

A step has a budget of tokens. Decodes come first, one token each, so that a new request never pauses a
running stream. Prompts get the rest, in chunks. Beside running decodes the chunks are smaller, because every
decode waits for the whole step. Of the chunk budget the oldest prompt gets half; the other half goes to the
prompts with the least work left: short follow-ups overtake a long first turn, and the long one advances too.

A waiting sequence is admitted when its whole prompt fits and the running sequences still have room to grow,
so two prompts never block each other half way. If a running sequence cannot grow, the one with the greatest
rank is preempted: its blocks are released (cached ones stay cached) and it is recomputed later. The sequence
with the smallest rank always advances, so every sequence ends. A sequence that fills the pool alone ends
with `length`.

Single-threaded. It does not know torch, the meaning of tokens, or the time: time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine_adapter.engine.kv.block_manager import BlockManager
from engine_adapter.engine.kv.sequence import FinishReason, Sequence, SequenceStatus
from engine_adapter.engine.scheduling.step_pace import StepPace
from engine_adapter.engine.scheduling.waiting_queue import WaitingQueue


class QueueFull(Exception):
    """The waiting queue has reached its configured limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queue."""

    max_batch_tokens: int = 512
    max_prefill_tokens_beside_decodes: int = 128
    max_step_s: float | None = None  # prompts get fewer tokens per step to stay below it
    max_num_sequences: int = 32
    max_num_waiting: int = 1024

    def __post_init__(self) -> None:
        if self.max_num_sequences < 1:
            raise ValueError("max_num_sequences must be at least 1")
        if self.max_batch_tokens < self.max_num_sequences:
            raise ValueError(
                f"max_batch_tokens {self.max_batch_tokens} is less than max_num_sequences "
                f"{self.max_num_sequences}: a step needs room for one token of each sequence"
            )
        if self.max_prefill_tokens_beside_decodes < 1:
            raise ValueError("max_prefill_tokens_beside_decodes must be at least 1")
        if self.max_step_s is not None and self.max_step_s <= 0:
            raise ValueError("max_step_s must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """One sequence's part of a step: compute `num_new_tokens` tokens after `num_computed_tokens`."""

    sequence: Sequence
    num_new_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last known token, whose logits give the next one."""
        return self.sequence.num_computed_tokens + self.num_new_tokens == self.sequence.num_tokens

    @property
    def scored_positions(self) -> range:
        """Positions of this step whose logits give the log-probability of the next prompt token."""
        sequence = self.sequence
        if not sequence.scores_prompt:
            return range(0)
        start = max(sequence.num_computed_tokens, len(sequence.sampling_state.prompt_logprobs))
        end = min(sequence.num_computed_tokens + self.num_new_tokens, sequence.num_prompt_tokens - 1)
        return range(start, end)


@dataclass(slots=True, kw_only=True)
class ScheduledBatch:
    """Everything that one step computes, and the sequences that ended while it was planned."""

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
            on_admitted: called with each sequence that has got its blocks; may set `Sequence.load_id`.
        """
        self.config = config
        self.blocks = blocks
        self.pace = StepPace(config.max_step_s)
        self._on_admitted = on_admitted
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def __repr__(self) -> str:
        counts = f"{len(self.running)} running, {len(self.waiting)} waiting"
        return f"<Scheduler {counts}, {self.num_preemptions} preemptions, {self.blocks!r}>"

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            QueueFull: too many requests are waiting.
        """
        if len(self.waiting) >= self.config.max_num_waiting:
            raise QueueFull(f"{len(self.waiting)} requests are already waiting")
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a waiting or running sequence and free its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.blocks.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def schedule(self, now_s: float) -> ScheduledBatch:
        """Plan one step. Changes: admits, preempts, allocates blocks, ends sequences that cannot continue."""
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
        """Record how long a step took. Changes: how many prompt tokens the next one may take."""
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
        # Smallest rank first: victims have the greatest, so nothing scheduled here is preempted.
        for sequence in sorted(self.running, key=lambda sequence: sequence.rank):
            if sequence.status is not SequenceStatus.RUNNING or not sequence.is_decoding:
                continue
            if self._make_room(sequence, batch):
                batch.scheduled.append(ScheduledSequence(sequence=sequence, num_new_tokens=1))

    def _make_room(self, sequence: Sequence, batch: ScheduledBatch) -> bool:
        """Grow by one token; preempt sequences, greatest rank first, until it fits or is preempted itself."""
        while not self.blocks.grow(sequence, sequence.num_tokens):
            victim = max(self.running, key=lambda running: running.rank)
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
        """Move waiting sequences to running while slots and blocks last."""
        for sequence in self.waiting:
            if len(self.running) >= self.config.max_num_sequences:
                break
            matched = self.blocks.match_prefix(sequence)
            if self.blocks.waits_for_another(sequence, len(matched)):
                continue  # the same block is being computed: reuse it later instead of computing it twice
            if not self.blocks.admit(sequence, matched, num_spare=len(self.running)):
                if self.running:
                    break  # in order: later small prompts must not starve a large one
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
        """Share the rest of the budget between sequences that are not decoding in this step."""
        budget = self.config.max_batch_tokens - batch.num_tokens
        if batch.scheduled:
            budget = min(budget, self.config.max_prefill_tokens_beside_decodes)
        budget = self.pace.cap(budget, has_decodes=bool(batch.scheduled))
        decoding = {item.sequence.request_id for item in batch.scheduled}
        prompts = [
            sequence
            for sequence in self.running
            if sequence.request_id not in decoding and sequence.load_id is None
        ]
        for sequence, num_new_tokens in share_prefill_budget(prompts, budget):
            batch.scheduled.append(ScheduledSequence(sequence=sequence, num_new_tokens=num_new_tokens))


def share_prefill_budget(prompts: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Split a chunk budget: half to the smallest rank, the rest by least remaining work. Changes nothing.

    The half keeps the oldest prompt from starving; shortest-first minimises the mean wait of the others.
    Shares of zero are left out.
    """
    if not prompts or budget <= 0:
        return []
    oldest = min(prompts, key=lambda prompt: prompt.rank)
    shares = {oldest.request_id: min(oldest.num_uncomputed_tokens, -(-budget // 2))}
    left = budget - shares[oldest.request_id]
    by_work = sorted(prompts, key=lambda prompt: (prompt.num_uncomputed_tokens, prompt.rank))
    for sequence in by_work:
        share = shares.get(sequence.request_id, 0)
        extra = min(left, sequence.num_uncomputed_tokens - share)
        shares[sequence.request_id] = share + extra
        left -= extra
    return [(prompt, shares[prompt.request_id]) for prompt in prompts if shares[prompt.request_id] > 0]
