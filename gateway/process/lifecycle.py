"""One gateway process from its signal handlers to its exit, and what it reports to the service manager.

    SIGTERM, SIGINT   stop: not ready, finish running requests, at the drain deadline end them with an error
    a second one      stop at once
                      either way, what hangs then (a thread, a name look-up) is left behind at a last deadline
    SIGHUP            read the configuration and the certificates again

Knows nothing of requests: it starts, reloads and stops a `Gateway`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from gateway.config.config import Config
from gateway.config.file_watch import FileWatch
from gateway.observability.log_writer import LogWriter
from gateway.observability.logs import log_event
from gateway.observability.worker_reports import WorkerReports
from gateway.process.gateway import Gateway
from gateway.process.malloc import return_large_blocks
from gateway.process.systemd import notify_ready, notify_reloading, notify_stopping

GARBAGE_LIMIT = 20_000
"""Net number of new objects after which the garbage collector looks for cycles.

A request leaves no cycles, so the collector only walks the objects of open streams, about 50 each. With the
default limit of 700 it kept walking those of 1,500 streams and blocked the loop for 30 to 50 ms each time.
Cycles of this many objects hold a few MB.
"""


STOP_OVERDUE_S = 8.0
"""How long stopping may take besides the notice and the drain timeout; less than service managers add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a process is started with, apart from its configuration."""

    load: Callable[[], Config]
    """Reads the configuration again, in the same way as at start. Raises ConfigError."""
    config_path: Path | None = None
    record_path: Path | None = None
    sockets: Mapping[str, socket.socket] = field(default_factory=dict)
    worker_reports: WorkerReports | None = None
    """The other processes of `workers: N`."""
    lines: LogWriter | None = None
    """Takes the access lines."""


def serve(config: Config, launch: Launch) -> int:
    """Run one gateway until SIGTERM or SIGINT; a second signal stops it at once. Raises OSError."""
    return_large_blocks()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Process(config, launch).run())


def stop_timeout_s(config: Config) -> float:
    """Return how long after its signal a gateway may still exist."""
    return config.leaving_notice_s + config.drain_timeout_s + STOP_OVERDUE_S


def end_at_last(timeout_s: float) -> None:
    """End this process after `timeout_s`, with status 1, if it still exists.

    From a thread, because neither a blocked event loop nor the interpreter, which joins threads at its end,
    would come to it.
    """
    timer = threading.Timer(timeout_s, os._exit, (1,))
    timer.daemon = True
    timer.start()


class _Process:
    """The gateway with its signal handlers and file watches."""

    def __init__(self, config: Config, launch: Launch) -> None:
        self._launch = launch
        self._with_notice = True  # a signal from a terminal needs none
        self._gateway = Gateway(
            config,
            load=launch.load,
            record_path=launch.record_path,
            sockets=launch.sockets,
            worker_reports=launch.worker_reports,
            lines=launch.lines,
        )
        self._config_watch = FileWatch(self._config_files, self._reload, interval_s=self._interval_s)
        self._certificate_watch = FileWatch(
            self._certificate_files, self._gateway.reloader.renew_certificates, interval_s=self._interval_s
        )
        self._reloads: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        gateway = self._gateway
        await gateway.start()
        gc.collect()
        gc.freeze()  # objects from start-up are permanent: the collector need not walk them again
        gc.set_threshold(GARBAGE_LIMIT)
        stop, hurry = asyncio.Event(), asyncio.Event()
        self._handle_signals(stop, hurry)
        for watch in (self._config_watch, self._certificate_watch):
            watch.start()
        notify_ready(os.environ)
        await stop.wait()
        log_event("gateway_leaving", in_flight=gateway.proxy.num_in_flight)
        end_at_last(stop_timeout_s(gateway.config))
        for watch in (self._config_watch, self._certificate_watch):
            await watch.close()
        await asyncio.gather(*self._reloads, return_exceptions=True)
        notify_stopping(os.environ)
        await self._leave(hurry)
        log_event("gateway_stopped")
        return 0

    def _handle_signals(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()

        def on_stop_signal(number: int) -> None:
            self._with_notice = number == signal.SIGTERM
            (hurry if stop.is_set() else stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    async def _leave(self, hurry: asyncio.Event) -> None:
        """Stop in order, or at once when a second signal comes."""
        leaving = asyncio.ensure_future(self._gateway.stop(with_notice=self._with_notice))
        hurried = asyncio.ensure_future(hurry.wait())
        await asyncio.wait({leaving, hurried}, return_when=asyncio.FIRST_COMPLETED)
        if not leaving.done():
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
            await self._gateway.stop(drain_timeout_s=0)
        hurried.cancel()

    # -- reload

    def _on_reload_signal(self) -> None:
        task = asyncio.ensure_future(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self) -> None:
        notify_reloading(os.environ)
        try:
            await self._gateway.reloader.reload()
        finally:
            notify_ready(os.environ)  # even after an error, or the manager would wait forever

    def _config_files(self) -> Iterable[Path]:
        path = self._launch.config_path
        return (path,) if path is not None and self._gateway.config.reload.watch else ()

    def _certificate_files(self) -> Iterable[Path]:
        config = self._gateway.config
        return [
            path for tls in (config.listen.tls, config.admin.tls) if tls is not None for path in tls.files
        ]

    def _interval_s(self) -> float:
        return self._gateway.config.reload.interval_s
