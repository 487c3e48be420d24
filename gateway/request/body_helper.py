"""Where a request is parsed: here, or, when its body is large, in a helper process, so that no stream waits.

To parse a body of 20 MB takes 60 to 390 ms. In a thread it would still stop everything for 25 to 125 ms,
because msgspec and re hold the interpreter's lock through each call; to hand the bytes to another process
takes 6 to 35 ms at best, up to 120 on a busy machine (measured with the bodies of
`tests/bench/bench_large_bodies.py`). That process starts with the first large body and ends with us.

Invariants. A body gives the same facts in either place; the parser is pure, and both have the same options
and secret. The helper has one body at a time, and a deadline for it: when it is overdue it is killed. That or
its death costs the request with this body a 503, and nobody else: the next body starts a new helper. What
made it run out of memory must not be tried here. Where no process can be started, bodies are parsed here.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.process import BaseProcess
from typing import Final

from gateway.errors import Overloaded
from gateway.observability.logs import log_event
from gateway.values import Api, RequestFacts
from gateway.wire.encodings import MAX_RATIO
from gateway.wire.facts import FactsParser, IsSuspect, ParseOptions, is_read_whole
from gateway.wire.settings import KeySettings

START_TIMEOUT_S: Final = 30.0
READ_TIMEOUT_S: Final = 10.0
"""For one body. The largest that is allowed by default, 64 MiB, takes 1.5 s of CPU."""

RawHeaders = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserPlan:
    """What a parser is made from, here and in the helper."""

    settings: KeySettings
    secret: bytes
    max_decoded_bytes: int


class FactsReader:
    """Reads requests under one configuration. `parser` is for who has no large bodies."""

    def __init__(
        self, plan: ParserPlan, helper: BodyHelper, *, inline_bytes: int, is_suspect: IsSuspect
    ) -> None:
        """Bodies of up to `inline_bytes` are parsed here."""
        self.parser = _make_parser(plan, is_suspect)
        self._plan = plan
        self._helper = helper
        self._inline_bytes = inline_bytes

    def read_here(
        self, api: Api, raw_headers: RawHeaders, body: bytes, options: ParseOptions
    ) -> RequestFacts | None:
        """What `FactsParser.parse` returns or raises; None for a large body, see `read_apart`.

        A compressed body counts as large when what may come out of it is.
        """
        encoding = options["content_encoding"]
        grown_bytes = len(body) if encoding is None else len(body) * MAX_RATIO
        if grown_bytes > self._inline_bytes and is_read_whole(api, body, encoding):
            return None
        return self.parser.parse(api, raw_headers, body, **options)

    async def read_apart(
        self, api: Api, raw_headers: RawHeaders, body: bytes, options: ParseOptions
    ) -> RequestFacts:
        """The same in the helper process. Raises Overloaded when it has died or is overdue."""
        return await self._helper.read(partial(_parse, self._plan, api, tuple(raw_headers), body, options))


class BodyHelper:
    """The helper process of one gateway."""

    def __init__(self, *, read_timeout_s: float = READ_TIMEOUT_S) -> None:
        """Starts nothing."""
        self._read_timeout_s = read_timeout_s
        self._executor: ProcessPoolExecutor | None = None
        self._process: BaseProcess | None = None
        self._reading = asyncio.Lock()
        self._is_impossible = False

    async def read(self, job: Callable[[], RequestFacts]) -> RequestFacts:
        """Run `job` in the process when those before it are done, or here where there can be none.

        Raises what it raises; Overloaded when the process has died or was overdue.
        """
        await self._reading.acquire()
        reading = asyncio.ensure_future(self._read(job))
        reading.add_done_callback(self._next)
        return await asyncio.shield(reading)  # a client that leaves frees no process that still reads

    def _next(self, reading: asyncio.Future[RequestFacts]) -> None:
        self._reading.release()
        if not reading.cancelled():
            reading.exception()  # seen, also where the client has left

    async def _read(self, job: Callable[[], RequestFacts]) -> RequestFacts:
        executor = await self._started()
        if executor is None:
            return job()
        facts = asyncio.get_running_loop().run_in_executor(executor, job)
        executor.submit(os.getpid)  # its queue keeps the last thing sent: let that not be the body
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await facts
        except (BrokenProcessPool, TimeoutError) as error:
            is_overdue = isinstance(error, TimeoutError)
            log_event("body_helper_overdue" if is_overdue else "body_helper_died")
            await self.close()  # the next body starts a new one
            raise Overloaded(
                f"the body was not read within {self._read_timeout_s:g} s"
                if is_overdue
                else "the process that reads large bodies has died; it starts anew"
            ) from error

    async def _started(self) -> ProcessPoolExecutor | None:
        if self._executor is None and not self._is_impossible:
            try:
                self._executor, self._process = await asyncio.to_thread(_start)
            except (OSError, ImportError, TimeoutError, BrokenProcessPool) as error:
                log_event("body_helper_impossible", error=str(error))
                self._is_impossible = True
        return self._executor

    async def close(self) -> None:
        """Kill the process, whatever it is at."""
        executor, self._executor = self._executor, None
        process, self._process = self._process, None
        if executor is not None and process is not None:
            process.kill()
            await asyncio.to_thread(executor.shutdown, cancel_futures=True)


def _start() -> tuple[ProcessPoolExecutor, BaseProcess]:
    """Start the process and wait until it is ready. Blocks."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit sockets, threads and the event loop
    executor = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare)
    try:
        pid = executor.submit(os.getpid).result(START_TIMEOUT_S)
        (process,) = (child for child in multiprocessing.active_children() if child.pid == pid)
    except BaseException as error:
        executor.shutdown(wait=isinstance(error, BrokenProcessPool))  # what has died is soon reaped
        raise
    return executor, process


# -- in the helper


def _prepare() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they may go to the whole group; the gateway ends us
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A gateway that is killed cannot tell us."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


def _parse(
    plan: ParserPlan, api: Api, raw_headers: RawHeaders, body: bytes, options: ParseOptions
) -> RequestFacts:
    return _kept_parser(plan).parse(api, raw_headers, body, **options)


def _make_parser(plan: ParserPlan, is_suspect: IsSuspect) -> FactsParser:
    return FactsParser(
        plan.settings, plan.secret, max_decoded_bytes=plan.max_decoded_bytes, is_suspect=is_suspect
    )


@lru_cache(maxsize=2)  # two: while a new configuration takes over
def _kept_parser(plan: ParserPlan) -> FactsParser:
    """The suspects are not known here: each may be one."""
    return _make_parser(plan, lambda *_: True)
