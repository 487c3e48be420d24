"""Planning of steps, without a model: fake tokens stand for what the runner would sample."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_adapter.engine.kv.block_hash import namespace_hash, root_hash
from engine_adapter.engine.kv.block_manager import BlockManager
from engine_adapter.engine.kv.sequence import EngineRequest, FinishReason, Sequence, Timings
from engine_adapter.engine.model.sampling import SamplingParams, SamplingState
from engine_adapter.engine.scheduling.scheduler import (
    QueueFull,
    ScheduledBatch,
    Scheduler,
    SchedulerConfig,
    share_prefill_budget,
)
from paged_kv.block_pool import BlockPool

ROOT = root_hash({"model": "fake"})


class FakeEngine:
    """A scheduler whose every sampled token is `position % 7`."""

    def __init__(
        self, *, num_blocks: int = 16, block_size: int = 2, token_s: float = 0.0, **limits: int
    ) -> None:
        self.blocks = BlockManager(BlockPool(num_blocks), block_size)
        self.scheduler = Scheduler(SchedulerConfig(**limits), self.blocks)
        self.token_s = token_s  # what a token takes on the simulated machine
        self.live: dict[str, Sequence] = {}
        self.ended: dict[str, Sequence] = {}
        self.num_added = 0

    def add(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 4,
        salt: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Sequence:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = EngineRequest(
            request_id=f"r{self.num_added}",
            prompt_token_ids=prompt,
            sampling=sampling,
            cache_salt=salt,
            priority=priority,
            deadline_s=deadline_s,
        )
        sequence = Sequence(
            request=request,
            namespace=namespace_hash(ROOT, cache_salt=salt),
            arrival_order=self.num_added,
            timings=Timings(arrival_s=0.0),
            sampling_state=SamplingState(sampling, prompt),
            max_num_tokens=len(prompt) + max_tokens,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
        )
        self.scheduler.add(sequence)
        self.num_added += 1
        self.live[sequence.request_id] = sequence
        return sequence

    def step(self, now_s: float = 0.0) -> ScheduledBatch:
        batch = self.scheduler.schedule(now_s)
        self.scheduler.observe_step(batch, batch.num_tokens * self.token_s)
        for sequence in batch.finished:
            self.ended[sequence.request_id] = self.live.pop(sequence.request_id)
        for item in batch.scheduled:
            sequence = item.sequence
            assert len(sequence.block_table) * self.blocks.block_size >= (
                sequence.num_computed_tokens + item.num_new_tokens
            )
            samples = item.samples
            sequence.num_computed_tokens += item.num_new_tokens
            if samples:
                sequence.token_ids.append(sequence.num_tokens % 7)
            self.blocks.commit(sequence)
            if sequence.num_tokens >= sequence.max_num_tokens:
                self.scheduler.finish(sequence, FinishReason.LENGTH)
                self.ended[sequence.request_id] = self.live.pop(sequence.request_id)
        self.verify()
        return batch

    def verify(self) -> None:
        self.blocks.verify(list(self.live.values()))

    def work(self, batch: ScheduledBatch) -> dict[str, int]:
        return {item.sequence.request_id: item.num_new_tokens for item in batch.scheduled}


def test_decodes_go_on_beside_a_long_prompt() -> None:
    """A running decode gets its token in every step in which a long prompt is worked off in chunks."""
    engine = FakeEngine(
        num_blocks=64, max_batch_tokens=16, max_prefill_tokens_beside_decodes=4, max_num_sequences=4
    )
    engine.add([1, 2, 3], max_tokens=12)
    engine.step()
    engine.add(list(range(30)))
    for _ in range(6):
        work = engine.work(engine.step())
        assert work["r0"] == 1
        assert work["r1"] == 4


def test_a_slow_machine_cuts_prompts_smaller() -> None:
    """With an allowed time, chunks shrink to what fits in it, and to half of that beside a decode."""
    engine = FakeEngine(
        num_blocks=2048, max_batch_tokens=512, max_num_sequences=4, max_step_s=1, token_s=0.005
    )
    engine.add(list(range(2000)), max_tokens=40)
    assert [engine.step().num_tokens for _ in range(6)][-1] in range(190, 201)
    while not engine.live["r0"].is_decoding:
        engine.step()
    engine.add([7] * 100 + list(range(600)))
    assert [engine.step().num_tokens for _ in range(6)][-1] in range(94, 102)


def test_a_step_never_exceeds_its_budget() -> None:
    """However many prompts wait, a step computes at most max_batch_tokens tokens."""
    engine = FakeEngine(num_blocks=64, max_batch_tokens=8, max_num_sequences=8)
    for index in range(6):
        engine.add([index] * 9)
    while engine.scheduler.has_work:
        assert engine.step().num_tokens <= 8


def test_a_short_follow_up_overtakes_a_long_prompt() -> None:
    """The chunk budget goes half to the oldest and the rest to the least work, so short ones end first."""
    engine = FakeEngine(num_blocks=64, max_batch_tokens=8, max_num_sequences=4)
    long = engine.add(list(range(60)), max_tokens=1)
    engine.step()
    engine.add([9, 9, 9], max_tokens=1)
    batch = engine.step()
    assert engine.work(batch) == {"r0": 5, "r1": 3}
    assert "r1" in engine.ended
    assert long.num_computed_tokens > 8


def test_share_gives_everything_to_a_lone_prompt() -> None:
    """Nothing of the budget is lost when there is one taker, or when the oldest needs less than half."""
    engine = FakeEngine(num_blocks=64)
    old, young = engine.add([1] * 3), engine.add([2] * 20)
    assert share_prefill_budget([young], 10) == [(young, 10)]
    assert share_prefill_budget([old, young], 10) == [(old, 3), (young, 7)]
    assert share_prefill_budget([old, young], 0) == []


def test_priority_then_arrival() -> None:
    """Lower priority numbers are admitted first; equals in order of arrival."""
    engine = FakeEngine(max_num_sequences=1)
    for priority in (1, 0, 1, 0):
        engine.add([priority], max_tokens=1, priority=priority)
    while engine.scheduler.has_work:
        engine.step()
    assert list(engine.ended) == ["r1", "r3", "r0", "r2"]


def test_tenants_take_turns_by_tokens_served() -> None:
    """A tenant with a flood of requests does not delay another's single one behind all of them."""
    engine = FakeEngine(max_num_sequences=1)
    for _ in range(5):
        engine.add([1, 2, 3, 4], max_tokens=1, salt="flood")
    engine.step()
    engine.add([5], max_tokens=1, salt="quiet")
    while "r5" not in engine.ended:
        engine.step()
    assert len(engine.ended) <= 3


def test_idle_time_is_no_credit() -> None:
    """A tenant that was away does not get ahead for long: it starts at the others' level."""
    engine = FakeEngine(num_blocks=64, max_num_sequences=1)
    for _ in range(6):
        engine.add([1, 2], max_tokens=1, salt="busy")
    for _ in range(3):
        engine.step()
    for _ in range(6):
        engine.add([3, 4], max_tokens=1, salt="back")
    order = []
    while engine.scheduler.has_work:
        before = set(engine.ended)
        engine.step()
        order += [engine.ended[name].request.cache_salt for name in engine.ended if name not in before]
    assert order[:4].count("busy") >= 1


def test_deadline_ends_only_what_still_waits() -> None:
    """A waiting request past its deadline times out; a running one is left alone."""
    engine = FakeEngine(max_num_sequences=1)
    engine.add([1], max_tokens=5, deadline_s=10.0)
    engine.step(now_s=1.0)
    engine.add([2], deadline_s=10.0)
    engine.step(now_s=9.0)
    assert not engine.ended
    engine.step(now_s=10.0)
    assert engine.ended["r1"].finish_reason is FinishReason.TIMEOUT
    assert "r0" in engine.live


def test_full_queue_refuses() -> None:
    """The queue is bounded: one more waiting request is refused and leaves nothing behind."""
    engine = FakeEngine(max_num_waiting=1)
    engine.add([1])
    with pytest.raises(QueueFull):
        engine.add([2])
    assert len(engine.scheduler.waiting) == 1


def test_preemption_takes_the_latest_and_everyone_ends() -> None:
    """Out of blocks, the youngest running sequence goes back to the queue, and all end with full length."""
    engine = FakeEngine(num_blocks=6, block_size=2, max_num_sequences=4)
    old = engine.add([1, 2, 3], max_tokens=7)
    young = engine.add([4, 5, 6], max_tokens=7)
    while engine.scheduler.has_work:
        engine.step()
    assert old.num_preemptions == 0
    assert young.num_preemptions >= 1
    assert {item.num_output_tokens for item in engine.ended.values()} == {7}


def test_a_better_priority_is_not_preempted_for_a_worse_one() -> None:
    """The late but important sequence keeps its blocks; the early unimportant one yields."""
    engine = FakeEngine(num_blocks=6, block_size=2, max_num_sequences=4)
    unimportant = engine.add([1, 2, 3], max_tokens=7, priority=5)
    important = engine.add([4, 5, 6], max_tokens=7, priority=0)
    while engine.scheduler.has_work:
        engine.step()
    assert important.num_preemptions == 0
    assert unimportant.num_preemptions >= 1


def test_alone_and_full_ends_with_length() -> None:
    """A sequence that fills the whole pool alone ends as cut off, instead of preempting itself for ever."""
    engine = FakeEngine(num_blocks=2, block_size=2)
    engine.add([1, 2, 3], max_tokens=50)
    while engine.scheduler.has_work:
        engine.step()
    assert engine.ended["r0"].finish_reason is FinishReason.LENGTH


def test_prompt_that_can_never_fit_is_ended_for_capacity() -> None:
    """With nothing running and still no room, a prompt ends at once and those behind it are served."""
    engine = FakeEngine(num_blocks=2, block_size=2)
    engine.add([1] * 9)
    engine.add([2], max_tokens=1)
    engine.step()
    assert engine.ended["r0"].finish_reason is FinishReason.CAPACITY
    assert engine.ended["r1"].finish_reason is FinishReason.LENGTH


def test_same_prefix_is_computed_once() -> None:
    """Requests wait for a shared prefix that another request computes, then reuse it."""
    engine = FakeEngine(num_blocks=64, max_num_sequences=8)
    shared = list(range(10))
    for index in range(4):
        engine.add([*shared, 20 + index, 30 + index], max_tokens=1)
    first = engine.step()
    assert engine.work(first) == {"r0": 12}
    second = engine.step()
    assert engine.work(second) == {"r1": 2, "r2": 2, "r3": 2}


def test_waiting_for_a_prefix_ends_when_its_computer_is_aborted() -> None:
    """If the sequence that was computing a shared prefix goes away, the next one computes it."""
    engine = FakeEngine(num_blocks=64, max_batch_tokens=40, max_num_sequences=8)
    shared = list(range(60))
    first = engine.add([*shared, 70])
    engine.add([*shared, 71], max_tokens=1)
    engine.step()
    engine.scheduler.finish(engine.live.pop(first.request_id), FinishReason.ABORT)
    engine.verify()
    work = engine.work(engine.step())
    assert work["r1"] > 1


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_sequences": 0},
        {"max_batch_tokens": 3, "max_num_sequences": 4},
        {"max_prefill_tokens_beside_decodes": 0},
        {"max_step_s": 0},
    ],
)
def test_contradictory_limits_are_refused(limits: dict[str, int]) -> None:
    """Limits under which a step could not serve everybody fail at start."""
    with pytest.raises(ValueError, match=r"at least|less than|above"):
        SchedulerConfig(**limits)


class SchedulerUnderPressure(RuleBasedStateMachine):
    """Random requests, steps, aborts and pins on a tiny pool."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(
            num_blocks=7,
            block_size=2,
            max_batch_tokens=6,
            max_prefill_tokens_beside_decodes=3,
            max_num_sequences=3,
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=11),
        max_tokens=st.integers(1, 6),
        salt=st.sampled_from(["", "a"]),
        priority=st.integers(0, 1),
    )
    def add(self, prompt: list[int], max_tokens: int, salt: str, priority: int) -> None:
        self.engine.add(prompt, max_tokens=max_tokens, salt=salt, priority=priority)

    @rule()
    def step(self) -> None:
        batch = self.engine.scheduler.schedule(0.0)
        assert batch.num_tokens <= 6
        self.engine_finish(batch)

    def engine_finish(self, batch: ScheduledBatch) -> None:
        engine = self.engine
        for sequence in batch.finished:
            engine.ended[sequence.request_id] = engine.live.pop(sequence.request_id)
        for item in batch.scheduled:
            sequence, samples = item.sequence, item.samples
            sequence.num_computed_tokens += item.num_new_tokens
            if samples:
                sequence.token_ids.append(sequence.num_tokens % 2)
            engine.blocks.commit(sequence)
            if sequence.num_tokens >= sequence.max_num_tokens:
                engine.scheduler.finish(sequence, FinishReason.LENGTH)
                engine.ended[sequence.request_id] = engine.live.pop(sequence.request_id)

    @rule()
    def step_that_fails(self) -> None:
        """The runner raised: every sequence of the step ends, with nothing recorded as computed."""
        batch = self.engine.scheduler.schedule(0.0)
        for sequence in batch.finished:
            self.engine.ended[sequence.request_id] = self.engine.live.pop(sequence.request_id)
        for item in batch.scheduled:
            self.engine.scheduler.finish(item.sequence, FinishReason.ERROR)
            del self.engine.live[item.sequence.request_id]

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.live)))
        self.engine.scheduler.finish(self.engine.live.pop(name), FinishReason.ABORT)

    @rule()
    def clear_cache(self) -> None:
        self.engine.blocks.clear_cache()

    @invariant()
    def everything_adds_up(self) -> None:
        self.engine.verify()
        scheduler = self.engine.scheduler
        assert len(scheduler.running) <= 3
        assert len(scheduler.running) + len(scheduler.waiting) == len(self.engine.live)

    def teardown(self) -> None:
        """Whatever happened, the rest is worked off in bounded time and nothing is held in the end."""
        bound = 50 * (len(self.engine.live) + 1)
        while self.engine.scheduler.has_work:
            bound -= 1
            assert bound > 0, "no progress"
            self.engine_finish(self.engine.scheduler.schedule(0.0))
        assert not self.engine.live
        assert self.engine.blocks.pool.counts().used == 0
        self.engine.verify()


TestSchedulerUnderPressure = SchedulerUnderPressure.TestCase
TestSchedulerUnderPressure.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSchedulerUnderPressure.__doc__ = "No order of requests, aborts and faults loses a block or a request."
