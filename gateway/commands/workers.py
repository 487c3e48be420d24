"""`workers: N`: several gateway processes on one port, and the parent that keeps them running.

Each is a whole gateway. The kernel deals new connections out among them (SO_REUSEPORT); what they must agree
on is in Redis: bindings, load, operators' orders. Each has an admin listener of its own, on consecutive
ports; an order given at one of them reaches the others within a second. Each shows the numbers of all (see
`siblings`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time

import msgspec

from gateway.config import Config
from gateway.logs import log_event
from gateway.siblings import shared_folder

RESTART_PAUSE_S = 1.0


def for_worker(config: Config, number: int) -> Config:
    """The configuration of one of the processes: the admin ports follow each other."""
    if not number or not config.admin.port:
        return config
    admin = msgspec.structs.replace(config.admin, port=config.admin.port + number)
    return msgspec.structs.replace(config, admin=admin)


async def run_workers(count: int) -> int:
    """Start `count` processes with our own arguments, restart any that dies, stop all on a signal."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    processes: dict[int, asyncio.subprocess.Process] = {}

    def on_signal(number: signal.Signals) -> None:
        stopping.set()
        for process in processes.values():  # also the second one: the children then hurry
            if process.returncode is None:
                process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    with shared_folder() as folder:
        arguments = ["--die-with-parent", "--shared-folder", str(folder)]
        workers = [_keep(worker, arguments, processes, stopping) for worker in range(count)]
        return max(await asyncio.gather(*workers))


async def _keep(
    worker: int,
    arguments: list[str],
    processes: dict[int, asyncio.subprocess.Process],
    stopping: asyncio.Event,
) -> int:
    """Run one process until the signal. Returns its exit status; a failure at the first start is final."""
    command = [sys.executable, "-m", "gateway.main", *sys.argv[1:], "--worker", str(worker), *arguments]
    has_lived = False
    while True:
        started_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
        processes[worker] = process
        status = await process.wait()
        has_lived = has_lived or time.monotonic() - started_s > 5
        if stopping.is_set():
            return max(status, 0)
        if not has_lived:
            stopping.set()
            for other in processes.values():
                if other.returncode is None:
                    other.terminate()
            return status if status > 0 else 1
        log_event("worker_restarted", worker=worker, status=status)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESTART_PAUSE_S):
                await stopping.wait()
                return 0
