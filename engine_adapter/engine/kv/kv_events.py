"""KV events on the wire: vLLM's format in its map form, with three additions.

Payload = msgpack of an array `[ts, events, data_parallel_rank, epoch, digest, num_blocks]`. The first three
are vLLM's `EventBatch`; its decoders ignore the others, which are ours:

    epoch       changes when the cache starts empty; a new epoch means: forget everything about this worker
    digest      XOR of the first 16 bytes of all resident block hashes, after this batch
    num_blocks  number of resident blocks, after this batch

Each event is a map with a `type`: `BlockStored`, `BlockRemoved`, `AllBlocksCleared`; hashes are 32 bytes.
A batch without events is a heartbeat. A receiver that has applied all batches computes the same digest. If
it does not, it asks for a snapshot: batches of `BlockStored`, parents first, numbered with the last event
batch that they contain, so that the live stream continues without a gap.

This module is the state behind the stream, pure and single-threaded: what is resident, the last batches for
replay, the next number. The publisher owns sockets, threads and clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.prefix_cache import CachedBlock

MEDIUM = "GPU"  # vLLM's word for the engine's own memory, on a CPU too
DIGEST_BYTES = 16
SNAPSHOT_BLOCKS_PER_BATCH = 256


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, kw_only=True):
    """A run of blocks, each the child of the one before."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, kw_only=True):
    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One message. Field order is the wire's order."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None
    epoch: str = ""
    digest: bytes = b""
    num_blocks: int = 0


class EventJournal:
    """Resident blocks, the digest over them, and the batches that led here."""

    def __init__(self, *, epoch: str, block_size: int, num_replayable: int = 10_000) -> None:
        self.epoch = epoch
        self.next_sequence = 0
        self._block_size = block_size
        self._resident: dict[BlockHash, CachedBlock] = {}
        self._digest = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=num_replayable)
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def digest(self) -> bytes:
        return self._digest.to_bytes(DIGEST_BYTES, "big")

    @property
    def num_blocks(self) -> int:
        return len(self._resident)

    def append(
        self, removed: Iterable[CachedBlock], stored: Iterable[CachedBlock], ts: float
    ) -> tuple[int, bytes]:
        """Apply one step's changes, removals first; return the batch's number and payload."""
        removed_hashes = [bytes(entry.block_hash) for entry in removed if self._drop(entry.block_hash)]
        stored_entries = [entry for entry in stored if self._add(entry)]
        events: list[KVEvent] = []
        if removed_hashes:
            events.append(BlockRemoved(block_hashes=removed_hashes, medium=MEDIUM))
        events.extend(self._stored_events(stored_entries))
        return self._number(events, ts)

    def heartbeat(self, ts: float) -> tuple[int, bytes]:
        """Return a numbered batch without events."""
        return self._number([], ts)

    def replay(self, start_sequence: int) -> Iterator[tuple[int, bytes]]:
        """Return the remembered batches from `start_sequence` on."""
        return ((number, payload) for number, payload in list(self._sent) if number >= start_sequence)

    def snapshot(self, ts: float) -> tuple[int, list[bytes]]:
        """Return the number of the last batch that the snapshot contains (-1: none), and its batches."""
        entries = list(self._in_tree_order())
        payloads = []
        for start in range(0, len(entries), SNAPSHOT_BLOCKS_PER_BATCH):
            part = entries[start : start + SNAPSHOT_BLOCKS_PER_BATCH]
            payloads.append(self._encode(list(self._stored_events(part)), ts))
        return self.next_sequence - 1, payloads

    def _stored_events(self, entries: list[CachedBlock]) -> Iterator[BlockStored]:
        """Make one event of each run of consecutive blocks."""
        run: list[CachedBlock] = []
        for entry in entries:
            if run and entry.parent_hash != run[-1].block_hash:
                yield self._stored_event(run)
                run = []
            run.append(entry)
        if run:
            yield self._stored_event(run)

    def _stored_event(self, run: list[CachedBlock]) -> BlockStored:
        tokens = b"".join(entry.token_bytes for entry in run)
        parent = run[0].parent_hash
        return BlockStored(
            block_hashes=[bytes(entry.block_hash) for entry in run],
            # A namespace is not a block, so the first block of a prompt has no parent on the wire.
            parent_block_hash=bytes(parent) if parent in self._resident else None,
            token_ids=np.frombuffer(tokens, dtype="<u4").tolist(),
            block_size=self._block_size,
            medium=MEDIUM,
        )

    def _in_tree_order(self) -> Iterator[CachedBlock]:
        """Walk the resident tree depth first: parents before children, chains in one piece."""
        children: dict[BlockHash, list[CachedBlock]] = {}
        for entry in self._resident.values():
            children.setdefault(entry.parent_hash, []).append(entry)
        roots = [entry for entry in self._resident.values() if entry.parent_hash not in self._resident]
        stack = roots[::-1]
        while stack:
            entry = stack.pop()
            yield entry
            stack.extend(reversed(children.get(entry.block_hash, ())))

    def _add(self, entry: CachedBlock) -> bool:
        if entry.block_hash in self._resident:
            return False
        self._resident[entry.block_hash] = entry
        self._digest ^= int.from_bytes(entry.block_hash[:DIGEST_BYTES], "big")
        return True

    def _drop(self, block_hash: BlockHash) -> bool:
        if self._resident.pop(block_hash, None) is None:
            return False
        self._digest ^= int.from_bytes(block_hash[:DIGEST_BYTES], "big")
        return True

    def _number(self, events: list[KVEvent], ts: float) -> tuple[int, bytes]:
        number, payload = self.next_sequence, self._encode(events, ts)
        self.next_sequence += 1
        self._sent.append((number, payload))
        return number, payload

    def _encode(self, events: list[KVEvent], ts: float) -> bytes:
        return self._encoder.encode(
            EventBatch(ts=ts, events=events, epoch=self.epoch, digest=self.digest, num_blocks=self.num_blocks)
        )
