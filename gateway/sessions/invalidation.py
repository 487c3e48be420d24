"""Learning of moves made by other replicas, and detecting when their messages do not arrive.

The script that moves or ends a session publishes a message. Publish/subscribe loses messages silently: a
broken connection, a full buffer, a subscription left on a demoted master. So each replica sends itself a
heartbeat over its command connection and expects it back over its subscription. While heartbeats come back,
everything read since the subscription began can be trusted until it expires. When three are missing, the
channel counts as broken and is reopened, and what was read before is no longer trusted.

Why publish/subscribe and not RESP3 client tracking: tracking makes the server remember every key that this
replica caches, loses its state just as silently at a fail-over, and is not available in redis-py for asyncio,
Sentinel and Cluster alike. Moves are rare, so there are few messages.

Bound: the other replicas follow a move within milliseconds while the channel works, and within
max(`local_ttl_s`, three heartbeats) when it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from gateway.observability.logs import log_event
from gateway.redis_link.link import RedisLink, Unavailable
from gateway.values import SessionKey

logger = logging.getLogger(__name__)

MAX_SILENT_BEATS = 3


class _ChannelBroken(Exception):
    """The subscription is no longer reliable."""


class InvalidationChannel:
    """One subscription and its heartbeat. The store runs `run` as a task."""

    def __init__(
        self,
        link: RedisLink,
        *,
        replica: str,
        interval_s: float,
        on_move: Callable[[SessionKey, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._moves = link.layout.moves_channel.encode()
        self._beats = link.layout.beat_channel(replica).encode()
        self._interval_s = interval_s
        self._on_move = on_move
        self._clock = clock
        self.live_since_s: float | None = (
            None  # since when every move has been received; None: the channel is broken
        )
        self.num_moves_heard = 0

    async def run(self, on_change: Callable[[float | None], None]) -> None:
        """Keep a subscription open, forever. Calls `on_change` when the channel becomes live or broken."""
        while True:
            try:
                await self._listen(on_change)
            except (RedisError, OSError, TimeoutError, _ChannelBroken) as error:
                log_event("session_channel_broken", level=logging.DEBUG, reason=repr(error)[:200])
            except Exception:  # task supervisor: on malformed replies redis-py may raise anything
                logger.exception("session_channel_unexpected_error")
            finally:
                self._set_live(None, on_change)
            await asyncio.sleep(self._interval_s)

    # --- private ---------------------------------------------------------------------------------

    async def _listen(self, on_change: Callable[[float | None], None]) -> None:
        """Run one subscription until it breaks. Always ends with an exception."""
        client = self._link.open_subscriber()
        subscription = client.pubsub()
        try:
            async with asyncio.timeout(2 * self._link.patience_s):
                await subscription.subscribe(self._moves, self._beats)
                await self._confirm(subscription)
            await self._hear(subscription, self._clock(), on_change)
        finally:
            with contextlib.suppress(RedisError, OSError):
                await subscription.aclose()  # type: ignore[no-untyped-call]  # redis-py
                await client.aclose(close_connection_pool=True)

    async def _confirm(self, subscription: Any) -> None:
        """Wait until Redis has confirmed both channels; later messages are delivered."""
        num_confirmed = 0
        while num_confirmed < 2:
            message = await subscription.get_message(timeout=self._link.patience_s)
            if message is not None and message["type"] == "subscribe":
                num_confirmed += 1

    async def _hear(
        self, subscription: Any, subscribed_at_s: float, on_change: Callable[[float | None], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        next_beat_s = loop.time()
        num_silent = num_sent = 0
        while True:
            wait_s = next_beat_s - loop.time()
            if wait_s <= 0:
                if num_silent >= MAX_SILENT_BEATS:
                    raise _ChannelBroken("heartbeats do not come back")
                num_sent += 1
                num_silent += 1
                await self._send_beat(num_sent)
                next_beat_s = loop.time() + self._interval_s
                continue
            message = await subscription.get_message(timeout=wait_s)
            if message is None:
                continue
            if message["type"] != "message":
                raise _ChannelBroken("subscribed again: messages may be missing")
            if message["channel"] == self._moves:
                self._hear_move(message["data"])
            elif message["data"] == b"%d" % num_sent:
                num_silent = 0
                self._set_live(subscribed_at_s, on_change)

    async def _send_beat(self, number: int) -> None:
        with contextlib.suppress(Unavailable):
            await self._link.ask_patiently(0, lambda: self._link.command("PUBLISH", self._beats, number))

    def _hear_move(self, data: bytes) -> None:
        """Parse `<version> <session key>`; anything else is ignored, as messages are not trusted."""
        version, _, key = data.partition(b" ")
        if version.isdigit() and len(version) < 20:
            self.num_moves_heard += 1
            self._on_move(SessionKey(key.decode("utf-8", "replace")), int(version))

    def _set_live(self, since_s: float | None, on_change: Callable[[float | None], None]) -> None:
        if since_s != self.live_since_s:
            self.live_since_s = since_s
            on_change(since_s)
