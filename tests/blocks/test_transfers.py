"""Stores, loads and computing on simulated streams: the three rules keep blocks intact in every order."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
import torch

from paged_kv.transfers import BlockTransfers, Event, InlineStream, LayerLoads, Stream, transfers_for

NUM_LAYERS = 3
ORDERS = 200


class Point:
    """An event of a simulated stream."""

    def __init__(self) -> None:
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed


@dataclass
class SimulatedStream:
    """Work in a queue; the machine runs the head of any queue whose awaited events have passed."""

    queue: list[tuple[list[Event], Callable[..., None]]] = field(default_factory=list)
    awaited: list[Event] = field(default_factory=list)

    def submit(self, work: Callable[..., None]) -> None:
        self.queue.append((self.awaited, work))
        self.awaited = []

    def record_event(self) -> Event:
        point = Point()
        self.submit(lambda: setattr(point, "has_passed", True))
        return point

    def wait_event(self, event: Event) -> None:
        self.awaited = [*self.awaited, event]

    @property
    def is_ready(self) -> bool:
        return bool(self.queue) and all(event.query() for event in self.queue[0][0])


class Machine:
    """Three simulated streams over blocks of one value per layer, run in a random order."""

    def __init__(self, transfers: type[BlockTransfers], seed: int) -> None:
        self.compute, self.load, self.store = SimulatedStream(), SimulatedStream(), SimulatedStream()
        self.transfers = transfers(compute=self.compute, load=self.load, store=self.store)
        self.chance = random.Random(seed)
        self.blocks = [["nothing"] * NUM_LAYERS for _ in range(2)]
        self.host: list[str] = ["nothing"] * NUM_LAYERS
        self.seen: list[str] = []

    def run(self, steps: int | None = None) -> None:
        """Run some queued work, or all of it."""
        while steps is None or steps > 0:
            ready = [stream for stream in (self.compute, self.load, self.store) if stream.is_ready]
            if not ready:
                return
            self.chance.choice(ready).queue.pop(0)[1]()
            steps = None if steps is None else steps - 1

    def write(self, block_id: int, text: str) -> None:
        for layer in range(NUM_LAYERS):
            self.compute.submit(lambda layer=layer: self.blocks[block_id].__setitem__(layer, text))

    def read(self, block_id: int, loads: LayerLoads | None = None) -> None:
        for layer in range(NUM_LAYERS):
            if loads is not None:
                loads.before_layer(layer)
            self.compute.submit(lambda layer=layer: self.seen.append(self.blocks[block_id][layer]))

    def copy_out(self, block_id: int) -> None:
        def copy(stream: Stream) -> None:
            assert isinstance(stream, SimulatedStream)
            for layer in range(NUM_LAYERS):
                stream.submit(lambda layer=layer: self.host.__setitem__(layer, self.blocks[block_id][layer]))
            self.arrived = stream.record_event()

        self.transfers.store([block_id], copy)

    def copy_in(self, block_id: int) -> LayerLoads:
        def copy(stream: Stream, layer: int) -> None:
            assert isinstance(stream, SimulatedStream)
            stream.submit(lambda: self.blocks[block_id].__setitem__(layer, self.host[layer]))

        return self.transfers.load([block_id], NUM_LAYERS, copy)


def live(machine: Machine) -> None:
    """Write a block, store it, recycle it at once, and load the stored text into another."""
    machine.write(0, "first")
    machine.copy_out(0)
    machine.run(machine.chance.randrange(8))
    machine.transfers.before_reuse(0)
    machine.write(0, "second")
    machine.write(1, "third")
    machine.read(1)
    machine.run(machine.chance.randrange(8))
    while not machine.arrived.query():  # a tier knows when its copy is complete
        machine.run(1)
    loads = machine.copy_in(1)
    machine.read(0)
    machine.read(1, loads)
    machine.run()
    assert machine.seen == ["third"] * NUM_LAYERS + ["second"] * NUM_LAYERS + ["first"] * NUM_LAYERS


class StoreDoesNotWait(BlockTransfers):
    """Rule 1 dropped."""

    def store(self, block_ids: Iterable[int], copy_out: Callable[[Stream], None]) -> Event:
        copy_out(self._store)
        stored = self._store.record_event()
        self._stores.update(dict.fromkeys(block_ids, stored))
        return stored


class LoadDoesNotWait(BlockTransfers):
    """The first half of rule 2 dropped."""

    def load(
        self, block_ids: Iterable[int], num_layers: int, copy_in: Callable[[Stream, int], None]
    ) -> LayerLoads:
        events = []
        for layer in range(num_layers):
            copy_in(self._load, layer)
            events.append(self._load.record_event())
        return LayerLoads(self._compute, events)


class AttentionWaitsOneLayerShort(BlockTransfers):
    """The second half of rule 2 dropped: each layer waits for the one before."""

    def load(
        self, block_ids: Iterable[int], num_layers: int, copy_in: Callable[[Stream, int], None]
    ) -> LayerLoads:
        loads = super().load(block_ids, num_layers, copy_in)
        loads._events = [loads._events[0], *loads._events[:-1]]
        return loads


class NextOwnerDoesNotWait(BlockTransfers):
    """Rule 3 dropped."""

    def before_reuse(self, block_id: int) -> None:
        pass


def test_no_order_of_work_corrupts_a_block() -> None:
    """Whatever the streams do first, every reader sees what was written for it."""
    for seed in range(ORDERS):
        live(Machine(BlockTransfers, seed))


@pytest.mark.parametrize(
    "broken", [StoreDoesNotWait, LoadDoesNotWait, AttentionWaitsOneLayerShort, NextOwnerDoesNotWait]
)
def test_each_rule_is_needed(broken: type[BlockTransfers]) -> None:
    """Without any one rule some order of work shows a reader another text."""
    failures = 0
    for seed in range(ORDERS):
        try:
            live(Machine(broken, seed))
        except AssertionError:
            failures += 1
    assert failures > 0


def test_a_block_under_store_cannot_be_loaded() -> None:
    """Loading over a block that is being copied out is refused before anything is queued."""
    machine = Machine(BlockTransfers, 0)
    machine.copy_out(0)
    with pytest.raises(ValueError, match="being stored"):
        machine.copy_in(0)
    assert [machine.transfers.is_settled(block_id) for block_id in (0, 1)] == [False, True]
    machine.run()
    assert machine.transfers.is_settled(0)


def test_without_a_gpu_everything_is_settled_at_once() -> None:
    """On a CPU a store is over when it returns, and a load's layers are there."""
    transfers = transfers_for(torch.device("cpu"))
    done: list[object] = []
    assert transfers.store([4], done.append).query()
    assert transfers.is_settled(4)
    transfers.load([4], 2, lambda stream, layer: done.append(layer)).before_layer(1)
    assert isinstance(done[0], InlineStream)
    assert done[1:] == [0, 1]
