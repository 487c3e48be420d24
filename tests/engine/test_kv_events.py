"""KV events: vLLM's bytes, a mirror that stays correct, and recovery from every kind of loss."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import zmq
from engine.tiny_models import generate, tiny_engine, tiny_loaded
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.engine.core.config import EngineConfig
from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.kv_event_publisher import KVEventConfig, KVEventPublisher
from engine_adapter.engine.kv.kv_events import EventJournal
from engine_adapter.engine.kv.prefix_cache import CachedBlock
from paged_kv.block_pool import BlockId


class VllmBlockStored(msgspec.Struct, tag="BlockStored", kw_only=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class VllmBlockRemoved(msgspec.Struct, tag="BlockRemoved", kw_only=True):
    block_hashes: list[bytes | int]
    medium: str | None = None


class VllmAllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class VllmEventBatch(msgspec.Struct, array_like=True):
    """The batch as a reader knows it that has never heard of our fields."""

    ts: float
    events: list[VllmBlockStored | VllmBlockRemoved | VllmAllBlocksCleared]
    data_parallel_rank: int | None = None


class Mirror:
    """A receiver: applies batches as an independent reader of the description would."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, list[int]] = {}
        self.next_number = 0
        self.epoch = ""

    def apply(self, payload: bytes) -> list[Any]:
        ts, events, rank, self.epoch, digest, num_blocks = msgspec.msgpack.decode(payload)
        assert isinstance(ts, float)
        assert rank is None
        for event in events:
            if event["type"] == "BlockStored":
                size = event["block_size"]
                for index, name in enumerate(event["block_hashes"]):
                    self.blocks[name] = event["token_ids"][index * size : (index + 1) * size]
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.blocks[name]
        assert num_blocks == len(self.blocks), "the batch's own count tells whether something was missed"
        assert digest == self.digest()
        return list(events)

    def apply_snapshot(self, payloads: list[bytes]) -> None:
        self.blocks = {}
        for payload in payloads:
            for event in msgspec.msgpack.decode(payload)[1]:
                size = event["block_size"]
                for index, name in enumerate(event["block_hashes"]):
                    self.blocks[name] = event["token_ids"][index * size : (index + 1) * size]

    def digest(self) -> bytes:
        value = 0
        for name in self.blocks:
            value ^= int.from_bytes(name[:16], "big")
        return value.to_bytes(16, "big")


class Recorder:
    """An observer that keeps what the engine said, through a journal."""

    def __init__(self) -> None:
        self.journal = EventJournal(epoch="e1", block_size=4)
        self.payloads: list[bytes] = []

    def record(self, removed: list[CachedBlock], stored: list[CachedBlock]) -> None:
        self.payloads.append(self.journal.append(removed, stored, 1.0)[1])


def entry(name: int, parent: int, tokens: list[int]) -> CachedBlock:
    return CachedBlock(
        block_hash=BlockHash(name.to_bytes(32, "big")),
        parent_hash=BlockHash(parent.to_bytes(32, "big")),
        token_bytes=b"".join(token.to_bytes(4, "little") for token in tokens),
        block_id=BlockId(name),
    )


def test_wire_bytes_are_vllms_map_form() -> None:
    """The batch is an array whose events are maps with a type tag and vLLM's field names."""
    journal = EventJournal(epoch="life", block_size=2)
    _, payload = journal.append([], [entry(1, 0, [5, 6]), entry(2, 1, [7, 8]), entry(3, 1, [9, 9])], 12.5)
    ts, events, rank, epoch, _, num_blocks = msgspec.msgpack.decode(payload)
    assert (ts, rank, epoch, num_blocks) == (12.5, None, "life", 3)
    name = [bytes(entry(i, 0, []).block_hash) for i in range(4)]
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": [name[1], name[2]],
        "parent_block_hash": None,
        "token_ids": [5, 6, 7, 8],
        "block_size": 2,
        "medium": "GPU",
    }
    assert events[1]["parent_block_hash"] == name[1]
    _, payload = journal.append([entry(3, 1, [9, 9])], [], 13.0)
    assert msgspec.msgpack.decode(payload)[1] == [
        {"type": "BlockRemoved", "block_hashes": [name[3]], "medium": "GPU"}
    ]


def test_a_reader_that_knows_only_vllms_fields_decodes_it() -> None:
    """A strict typed decoder with vLLM's three batch fields and its event classes accepts our batches."""
    journal = EventJournal(epoch="life", block_size=2)
    _, payload = journal.append([], [entry(1, 0, [5, 6])], 12.5)
    batch = msgspec.msgpack.decode(payload, type=VllmEventBatch)
    assert isinstance(batch.events[0], VllmBlockStored)
    assert msgspec.msgpack.decode(journal.heartbeat(1.0)[1], type=VllmEventBatch).events == []


def test_mirror_of_a_working_engine_is_its_cache() -> None:
    """Applying the events of an engine under pressure gives exactly the blocks in its cache, at each step."""
    recorder, mirror = Recorder(), Mirror()
    engine = LLMEngine(
        tiny_loaded(),
        EngineConfig(dtype="fp32", block_size=4, num_kv_blocks=12),
        observer=recorder,
    )
    for seed in range(12):
        generate(engine, random.Random(seed % 5).choices(range(97), k=10 + 2 * seed), 4)
        for payload in recorder.payloads:
            mirror.apply(payload)
        recorder.payloads.clear()
        assert set(mirror.blocks) == {bytes(block.block_hash) for block in engine.blocks.prefix_cache}
    assert engine.stats().num_evictions > 0
    assert engine.clear_cache() > 0
    for payload in recorder.payloads:
        mirror.apply(payload)
    assert not mirror.blocks


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=40), st.integers(0, 40))
def test_snapshot_and_resume_equal_the_whole_stream(changes: list[tuple[bool, int]], cut: int) -> None:
    """Joining late by snapshot, then applying what comes after it, ends where a reader from the start is."""
    journal, early, late = EventJournal(epoch="e", block_size=1), Mirror(), Mirror()
    resident: set[int] = set()
    resume_after = -1
    for index, (stores, name) in enumerate(changes):
        if index == cut:
            resume_after, payloads = journal.snapshot(0.0)
            late.apply_snapshot(payloads)
        block = entry(name, name // 2, [name])
        if stores and name not in resident:
            resident.add(name)
            number, payload = journal.append([], [block], 0.0)
        elif not stores and name in resident:
            resident.discard(name)
            number, payload = journal.append([block], [], 0.0)
        else:
            number, payload = journal.heartbeat(0.0)
        early.apply(payload)
        if index >= cut:
            assert number > resume_after
            late.apply(payload)
    assert set(early.blocks) == {name.to_bytes(32, "big") for name in resident}
    if cut < len(changes):
        assert late.blocks == early.blocks


def test_snapshot_lists_parents_first_in_whole_chains() -> None:
    """A snapshot of a tree stored in any order names each parent before its children."""
    journal = EventJournal(epoch="e", block_size=1)
    names = list(range(1, 32))
    random.Random(4).shuffle(names)
    for name in names:
        journal.append([], [entry(name, name // 2, [name])], 0.0)
    _, payloads = journal.snapshot(0.0)
    seen: set[bytes] = set()
    for payload in payloads:
        for event in msgspec.msgpack.decode(payload)[1]:
            parent = event["parent_block_hash"]
            assert parent is None or parent in seen
            seen.update(event["block_hashes"])
    assert len(seen) == 31


def test_unknown_removals_and_repeated_stores_say_nothing() -> None:
    """The journal filters what would make a receiver's state wrong."""
    journal = EventJournal(epoch="e", block_size=1)
    journal.append([], [entry(1, 0, [1])], 0.0)
    digest = journal.digest
    _, payload = journal.append([entry(9, 0, [9])], [entry(1, 0, [1])], 0.0)
    assert msgspec.msgpack.decode(payload)[1] == []
    assert journal.digest == digest


@pytest.fixture
def publisher() -> Any:
    config = KVEventConfig(heartbeat_interval_s=0.05, poll_interval_s=0.01, topic="kv")
    running = KVEventPublisher(config, block_size=4)
    running.start()
    yield running
    running.stop()


def ask(context: zmq.Context[Any], endpoint: str, request: bytes) -> list[tuple[int, bytes]]:
    """Send one request to the replay socket and return the answers before the end mark."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart([b"", request])
    answers: list[tuple[int, bytes]] = []
    while True:
        assert socket.poll(10_000), "no answer"
        _, topic, number, payload = socket.recv_multipart()
        assert topic == b"kv"
        if int.from_bytes(number, "big", signed=True) == -1 and not payload:
            socket.close(linger=0)
            return answers
        answers.append((int.from_bytes(number, "big", signed=True), payload))


def test_events_over_real_sockets(publisher: KVEventPublisher) -> None:
    """Subscribe, lose nothing, hear heartbeats while idle, and replay or snapshot what came before."""
    engine = LLMEngine(
        tiny_loaded(), EngineConfig(dtype="fp32", block_size=4, num_kv_blocks=12), observer=publisher
    )
    with zmq.Context() as context:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        socket.connect(publisher.endpoint)
        assert socket.poll(10_000), "an idle engine must send heartbeats"
        first_topic, first_number, _ = socket.recv_multipart()
        assert first_topic == b"kv"
        for seed in range(6):
            generate(engine, random.Random(seed).choices(range(97), k=22), 2)
        wanted = {bytes(block.block_hash) for block in engine.blocks.prefix_cache}
        mirror = Mirror()
        for _, payload in ask(context, publisher.replay_endpoint, (0).to_bytes(8, "big")):
            mirror.apply(payload)
        expected = int.from_bytes(first_number, "big") + 1
        live = Mirror()
        while set(live.blocks) != wanted:
            assert socket.poll(10_000), "events stopped before the mirror was complete"
            _, number, payload = socket.recv_multipart()
            assert int.from_bytes(number, "big") == expected
            expected += 1
            live.apply(payload)
        assert live.epoch == publisher.epoch
        snapshot = Mirror()
        answers = ask(context, publisher.replay_endpoint, b"snapshot")
        snapshot.apply_snapshot([payload for _, payload in answers])
        assert set(snapshot.blocks) == wanted
        assert answers[0][0] >= expected - 1
        assert ask(context, publisher.replay_endpoint, b"nonsense!") == []
        socket.close(linger=0)


def test_stopping_twice_is_harmless(publisher: KVEventPublisher) -> None:
    """Stop sends what is queued and may be called again."""
    engine = tiny_engine()
    generate(engine, [1, 2, 3, 4, 5], 1)
    publisher.stop()
    publisher.stop()
