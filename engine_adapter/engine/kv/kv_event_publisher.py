"""Sends KV events over ZMQ from its own thread, so that the engine's steps never wait for a socket.

Two sockets, like vLLM's: PUB with frames `(topic, 8-byte big-endian number, payload)`, and ROUTER for
receivers that missed something. A client sends one frame to the ROUTER after the empty delimiter:

    8-byte big-endian number    replay of the remembered batches from there on
    b"snapshot"                 the resident blocks, each frame numbered with the last batch contained

and gets `(topic, number, payload)` messages, ended by number -1 (all bits set) with an empty payload.

Changes are sent as they come, heartbeats on a timer, so an idle engine sends something too. The engine passes
values through a queue; the journal belongs to the thread. Neither socket blocks the thread (both drop what a
slow peer does not take), so the queue holds no more than one poll interval's changes. A receiver that missed
something sees the gap in the numbers, or the wrong digest, and asks again.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from engine_adapter.engine.kv.kv_events import EventJournal
from engine_adapter.engine.kv.prefix_cache import CachedBlock

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
SNAPSHOT_REQUEST = b"snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventConfig:
    """Where and how often to send."""

    endpoint: str = "tcp://127.0.0.1:*"
    replay_endpoint: str = "tcp://127.0.0.1:*"
    topic: str = ""
    heartbeat_interval_s: float = 5.0
    poll_interval_s: float = 0.05  # longest delay of an event and of the answer to a replay request
    send_high_water_mark: int = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    removed: list[CachedBlock]
    stored: list[CachedBlock]


class KVEventPublisher:
    """Owns the sockets, the thread and the journal. Start once, stop once."""

    def __init__(
        self, config: KVEventConfig, *, block_size: int, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self.epoch = secrets.token_hex(8)
        self.endpoint = ""  # the bound address, set by `start`
        self.replay_endpoint = ""
        self._wall_clock = wall_clock
        self._journal = EventJournal(epoch=self.epoch, block_size=block_size)
        self._changes: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        """Bind both sockets and start sending.

        Raises:
            zmq.ZMQError: an address cannot be bound.
        """
        self._publish = self._context.socket(zmq.PUB)
        self._publish.set_hwm(self.config.send_high_water_mark)
        self._publish.bind(self.config.endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.config.replay_endpoint)
        self.endpoint = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread.start()

    def record(self, removed: list[CachedBlock], stored: list[CachedBlock]) -> None:
        """Queue one step's changes; called by the engine's thread, does not block."""
        self._changes.put(_Change(removed=removed, stored=stored))

    def stop(self) -> None:
        """Send what is queued, then close. Idempotent."""
        if self._thread.is_alive():
            self._changes.put(None)
            self._thread.join()
        self._context.destroy(linger=200)

    def _run(self) -> None:
        next_heartbeat_s = time.monotonic()
        while True:
            if self._router.poll(0):
                self._answer()
            try:
                change = self._changes.get(timeout=self.config.poll_interval_s)
            except queue.Empty:
                change = _Change(removed=[], stored=[])
            if change is None:
                return
            if change.removed or change.stored:
                self._send(*self._journal.append(change.removed, change.stored, self._wall_clock()))
            if time.monotonic() >= next_heartbeat_s:
                self._send(*self._journal.heartbeat(self._wall_clock()))
                next_heartbeat_s = time.monotonic() + self.config.heartbeat_interval_s

    def _send(self, number: int, payload: bytes) -> None:
        self._publish.send_multipart([self.config.topic.encode(), _encode_number(number), payload])

    def _answer(self) -> None:
        """Answer one replay or snapshot request; an unknown request gets only the end mark."""
        frames = self._router.recv_multipart()
        if len(frames) != 3:
            return
        client, delimiter, request = frames
        topic = self.config.topic.encode()
        messages: list[tuple[int, bytes]] = []
        if request == SNAPSHOT_REQUEST:
            last, payloads = self._journal.snapshot(self._wall_clock())
            messages = [(last, payload) for payload in payloads]
        elif len(request) == 8:
            messages = list(self._journal.replay(int.from_bytes(request, "big")))
        else:
            logger.warning("kv_event_request_unknown", extra={"num_bytes": len(request)})
        for number, payload in messages:
            self._router.send_multipart([client, delimiter, topic, _encode_number(number), payload])
        self._router.send_multipart([client, delimiter, topic, END_OF_REPLAY, b""])


def _encode_number(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)
