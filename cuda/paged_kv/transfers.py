"""Orders computing on blocks and moving them: three streams, three rules.

    compute   the model: writes and reads blocks                (torch's current stream)
    store     copies blocks out, to a slower tier
    load      copies blocks in, layer by layer

Streams run concurrently, so that moving overlaps with computing. Only events order the work on a block:

1. A store waits for the compute work queued before it, which includes the block's last writer.
2. A load waits for the compute work queued before it, which includes the last reader of a recycled block.
   Attention of layer l waits for the load of layer l only.
3. A block whose store is in progress gets a new owner only through `before_reuse`: later work on it waits.

This module decides only the order; its caller decides what is copied and where.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Return whether the point has been passed."""


class Stream(Protocol):
    """A queue of work that runs in order. torch.cuda.Stream is one."""

    def record_event(self) -> Event:
        """Return the point after everything queued so far."""

    def wait_event(self, event: Event) -> None:
        """Make everything queued later wait for the event."""


class LayerLoads:
    """A load in progress: one event per layer."""

    def __init__(self, compute: Stream, events: list[Event]) -> None:
        self._compute = compute
        self._events = events

    def before_layer(self, layer: int) -> None:
        """Make the compute work queued from now on wait for one layer's blocks."""
        self._compute.wait_event(self._events[layer])


class BlockTransfers:
    """Orders stores and loads of blocks against computing. Only the thread that queues the work calls it."""

    def __init__(self, *, compute: Stream, load: Stream, store: Stream) -> None:
        self._compute = compute
        self._load = load
        self._store = store
        self._stores: dict[int, Event] = {}  # latest store of each block that may still be in progress

    def store(self, block_ids: Iterable[int], copy_out: Callable[[Stream], None]) -> Event:
        """Queue `copy_out`, which reads the blocks, on the store stream; return the event of its end."""
        self._store.wait_event(self._compute.record_event())
        copy_out(self._store)
        stored = self._store.record_event()
        self._stores.update(dict.fromkeys(block_ids, stored))
        return stored

    def before_reuse(self, block_id: int) -> None:
        """Make later computing and loading wait for the block's store, if one is in progress."""
        if not self.is_settled(block_id):
            self._compute.wait_event(self._stores.pop(block_id))

    def load(
        self, block_ids: Iterable[int], num_layers: int, copy_in: Callable[[Stream, int], None]
    ) -> LayerLoads:
        """Queue `copy_in`, which overwrites the blocks, for each layer on the load stream.

        Raises ValueError for a block whose store is in progress: it was reused too early.
        """
        if busy := [block_id for block_id in block_ids if not self.is_settled(block_id)]:
            raise ValueError(f"blocks {busy} are loaded while they are being stored")
        self._load.wait_event(self._compute.record_event())
        events = []
        for layer in range(num_layers):
            copy_in(self._load, layer)
            events.append(self._load.record_event())
        return LayerLoads(self._compute, events)

    def is_settled(self, block_id: int) -> bool:
        """Return whether no store of the block is in progress."""
        stored = self._stores.get(block_id)
        if stored is None:
            return True
        if not stored.query():
            return False
        del self._stores[block_id]
        return True


class InlineStream:
    """The stream of a machine without a GPU: work is done when queued, so nothing has to wait."""

    def record_event(self) -> Event:
        """Return an event that has passed."""
        return _PASSED

    def wait_event(self, event: Event) -> None:
        """Changes nothing."""


class _PassedEvent:
    def query(self) -> bool:
        return True


_PASSED = _PassedEvent()


def on_stream(stream: Stream) -> AbstractContextManager[object]:
    """Return a context in which torch queues its work on a stream of `BlockTransfers`."""
    if isinstance(stream, InlineStream):
        return nullcontext()
    import torch

    return cast("AbstractContextManager[object]", torch.cuda.stream(stream))  # type: ignore[arg-type]  # one of torch's own


def transfers_for(device: "torch.device") -> BlockTransfers:
    """Return the transfers of a device: new load and store streams beside torch's current one."""
    if device.type == "cpu":
        inline = InlineStream()
        return BlockTransfers(compute=inline, load=inline, store=inline)
    import torch

    new_stream = cast("Callable[[torch.device], Stream]", torch.cuda.Stream)
    # torch's streams accept only torch's events, and get no others here.
    compute = cast("Stream", torch.cuda.current_stream(device))
    return BlockTransfers(compute=compute, load=new_stream(device), store=new_stream(device))
