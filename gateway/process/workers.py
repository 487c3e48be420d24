"""`workers: N`: several gateway processes on one port, and the parent that keeps them running.

Each is a complete gateway. The kernel distributes new connections among them (SO_REUSEPORT, or one inherited
socket). What they must agree on is in Redis: bindings, load, operators' orders. Each has its own admin
listener, on consecutive ports; an order given at one of them reaches the others in about a second. Each shows
the metrics of all (see `worker_reports`).

The parent forwards signals, kills what does not end in time, restarts processes that die, and represents all
of them to the service manager: it is ready when all are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from gateway.config.config import Config
from gateway.observability.logs import log_event
from gateway.observability.worker_reports import shared_folder
from gateway.process.systemd import (
    inherited_names,
    notify_ready,
    notify_reloading,
    notify_stopping,
)

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
STABLE_AFTER_S = 60.0
"""A process that lived at least this long is restarted after the first, short pause."""


def for_worker(config: Config, number: int) -> Config:
    """Return the configuration of one process: admin ports are consecutive."""
    if not number or not config.admin.port:
        return config
    admin = msgspec.structs.replace(config.admin, port=config.admin.port + number)
    return msgspec.structs.replace(config, admin=admin)


async def run_workers(count: int, *, stop_timeout_s: float) -> int:
    """Start `count` processes with our own arguments, restart any that die, stop all on a signal.

    What still runs `stop_timeout_s` after the signal is killed.
    """
    with shared_folder() as folder:
        return await _Workers(count, folder, os.environ, stop_timeout_s).run()


class _Workers:
    """The processes by number. `folder` holds their reports and the sockets on which they report ready."""

    def __init__(self, count: int, folder: Path, environ: Mapping[str, str], stop_timeout_s: float) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._count, self._folder, self._environ = count, folder, environ
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._unready = set(range(count))
        self._has_started: set[int] = set()
        self._inherited = tuple(inherited_names(environ, os.getpid()).values())

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        endpoints = [await self._listen(worker) for worker in range(self._count)]
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        try:
            return max(await asyncio.gather(*(self._keep(worker) for worker in range(self._count))))
        finally:
            for endpoint in endpoints:
                endpoint.close()

    # -- signals

    def _on_stop_signal(self, number: signal.Signals) -> None:
        """Forward the signal. A second one is forwarded too: the children then stop at once."""
        if not self._stopping.is_set():
            notify_stopping(self._environ)
            asyncio.get_running_loop().call_later(self._stop_timeout_s, self._send_to_all, signal.SIGKILL)
        self._stopping.set()
        self._send_to_all(number)

    def _on_reload_signal(self) -> None:
        notify_reloading(self._environ)
        self._unready = set(range(self._count))
        self._send_to_all(signal.SIGHUP)

    def _send_to_all(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(number)

    # -- readiness

    async def _listen(self, worker: int) -> asyncio.DatagramTransport:
        """Listen to one process's notifications: we are its service manager."""
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Notices(self, worker), local_addr=self._notify_path(worker), family=socket.AF_UNIX
        )
        return transport

    def _notify_path(self, worker: int) -> str:
        return str(self._folder / f"{worker}.notify")

    def note_ready(self, worker: int) -> None:
        self._has_started.add(worker)
        if worker in self._unready:
            self._unready.discard(worker)
            if not self._unready:
                notify_ready(self._environ)

    # -- life

    async def _keep(self, worker: int) -> int:
        """Run one process until the signal and return its exit status. A process that dies before it was
        ever ready stops all: the same cause would keep the others from starting."""
        pause_s = FIRST_PAUSE_S
        while True:
            started_s = time.monotonic()
            process = self._processes[worker] = await self._start(worker)
            if self._stopping.is_set():  # the signal came while it was starting
                process.terminate()
            status = await process.wait()
            lived_s = time.monotonic() - started_s
            if self._stopping.is_set():
                return max(status, 0)
            if worker not in self._has_started:
                self._stopping.set()
                self._send_to_all(signal.SIGTERM)
                return status if status > 0 else 1
            if lived_s > STABLE_AFTER_S:
                pause_s = FIRST_PAUSE_S
            log_event("worker_died", worker=worker, status=status, restart_in_s=pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
                    return 0
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    async def _start(self, worker: int) -> asyncio.subprocess.Process:
        with _reload_signal_held():
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.main", *sys.argv[1:]),
                *("--worker", str(worker), "--shared-folder", str(self._folder), "--die-with-parent"),
                start_new_session=True,
                pass_fds=self._inherited,
                env={**self._environ, "NOTIFY_SOCKET": self._notify_path(worker)},
            )


class _Notices(asyncio.DatagramProtocol):
    """Receives the notifications of one process."""

    def __init__(self, workers: _Workers, worker: int) -> None:
        self._workers, self._worker = workers, worker

    def datagram_received(self, data: bytes, address: object) -> None:
        if b"READY=1" in data.split(b"\n"):
            self._workers.note_ready(self._worker)


@contextlib.contextmanager
def _reload_signal_held() -> Iterator[None]:
    """Block SIGHUP, also in the child: one that arrives before the child can handle it does not kill it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
