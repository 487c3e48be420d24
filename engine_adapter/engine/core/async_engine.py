"""Runs the synchronous engine on its own thread and makes it usable from asyncio.

Decides who may use the engine: one thread, between steps. The event loop puts commands into a queue; results
and step outputs come back through `call_soon_threadsafe`. Invariants:

- commands run in the order in which they were posted, so an abort posted after an add finds the request;
- a caller that leaves `generate`, normally or not, leaves nothing behind in the engine;
- when the thread dies, every waiting caller gets an error.

It does not know text or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.core.stats import EngineStats
from engine_adapter.engine.core.step_output import StepOutput
from engine_adapter.engine.kv.sequence import EngineRequest

IDLE_TICK_S = 2.0  # an idle engine checks for expired pins this often

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class EngineDead(Exception):
    """The engine's thread has stopped; the process must be restarted."""


class AsyncEngine:
    """Owns the engine thread from `start` to `close`. Its methods belong to one event loop."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls: set[asyncio.Future[Any]] = set()
        self._outputs: dict[str, asyncio.Queue[StepOutput | EngineDead]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: EngineDead | None = None
        self.latest_stats: EngineStats = engine.stats()  # replaced as a whole after each step: safe to read
        self.when_dead = asyncio.Event()
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.model_config.vocab_size

    def start(self) -> None:
        """Start the thread. Call once, inside the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Stop the thread after its current step. Idempotent."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def is_alive(self) -> bool:
        return self._death is None and self._thread.is_alive()

    async def call(self, function: Callable[[LLMEngine], Result]) -> Result:
        """Run a function on the engine's thread, between steps; its exception is raised here."""
        if self._death is not None:
            raise self._death
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def command() -> None:
            try:
                settle = functools.partial(_settle, future, function(self._engine))
            except Exception as error:
                settle = functools.partial(_fail, future, error)
            self.latest_stats = self._engine.stats()  # before the result: the caller must see its own change
            self._post(settle)

        self._calls.add(future)
        self._commands.put(command)
        try:
            return await future
        finally:
            self._calls.discard(future)

    async def generate(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[StepOutput, None]:
        """Run requests and yield the outputs of each step until all requests have finished.

        Use under `contextlib.aclosing`: leaving early aborts the requests that are still running.

        Raises:
            RequestRefused, QueueFull: as `LLMEngine.add_request`; then none of the requests runs.
            EngineDead: the engine has stopped.
        """
        outputs: asyncio.Queue[StepOutput | EngineDead] = asyncio.Queue()
        unfinished = {request.request_id for request in requests}
        self._outputs.update(dict.fromkeys(unfinished, outputs))
        try:
            await self.call(lambda engine: _add_all(engine, requests))
            while unfinished:
                output = await outputs.get()
                if isinstance(output, EngineDead):
                    raise output
                if output.finish_reason is not None:
                    unfinished.discard(output.request_id)
                yield output
        finally:
            for request in requests:
                self._outputs.pop(request.request_id, None)
            for request_id in unfinished:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Abort a request before the next step."""
        self._commands.put(lambda: _abort(self._engine, request_id))

    def _run(self) -> None:
        """The thread: run commands, then a step, and repeat; wait for commands while there is no work."""
        reason = "the engine was closed"
        try:
            while self._run_commands():
                if self._engine.has_work:
                    self._publish(self._engine.step())
        except Exception as error:
            logger.exception("engine_thread_died")
            reason = f"the engine stopped: {type(error).__name__}: {error}"
        finally:
            self._engine.close()
        self._post(lambda: self._die(EngineDead(reason)))

    def _run_commands(self) -> bool:
        """Run all queued commands; wait for one if the engine is idle. Returns False to stop."""
        ran_any = False
        while True:
            try:
                is_idle = not self._engine.has_work and not ran_any
                command = self._commands.get(block=is_idle, timeout=IDLE_TICK_S)
            except queue.Empty:
                if is_idle:
                    self._engine.tick()
                    self.latest_stats = self._engine.stats()
                break
            if command is None:
                return False
            command()
            ran_any = True
        if ran_any:
            self.latest_stats = self._engine.stats()
        return True

    def _publish(self, outputs: list[StepOutput]) -> None:
        self.latest_stats = self._engine.stats()
        if outputs:
            self._post(lambda: self._deliver(outputs))

    def _post(self, function: Callable[[], object]) -> None:
        """Run a function on the event loop. Does nothing if the loop is closed: nobody is waiting then."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            waiting = self._outputs.get(output.request_id)
            if waiting is not None:
                waiting.put_nowait(output)

    def _die(self, death: EngineDead) -> None:
        self._death = death
        self.when_dead.set()
        for waiting in set(self._outputs.values()):
            waiting.put_nowait(death)
        for future in self._calls:
            _fail(future, death)


def _settle(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():  # the caller may have gone away
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _add_all(engine: LLMEngine, requests: Sequence[EngineRequest]) -> None:
    """Add all or none."""
    added: list[str] = []
    try:
        for request in requests:
            engine.add_request(request)
            added.append(request.request_id)
    except Exception:
        for request_id in added:
            engine.abort(request_id)
        raise


def _abort(engine: LLMEngine, request_id: str) -> None:
    engine.abort(request_id)
