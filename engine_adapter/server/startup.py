"""The worker process: bind, load, serve, drain, exit.

Decides the order. The port is bound before the model is loaded, so a port in use is reported at once; the
server responds while loading, so that probes can distinguish "starting" from "gone". On SIGTERM or SIGINT new
requests get a 503 and running ones finish within the drain limit, then the exit code is 0; a second signal
ends the drain at once. If the engine dies, the process exits with code 1, so that a supervisor restarts it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq
from aiohttp import web

from engine_adapter.engine.checkpoint.loader import ModelUnusable, load_model, read_generation_defaults
from engine_adapter.engine.checkpoint.model_store import prepare_model
from engine_adapter.engine.core.async_engine import AsyncEngine
from engine_adapter.engine.core.config import EngineConfig
from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.kv_event_publisher import KVEventConfig, KVEventPublisher
from engine_adapter.engine.kv.kv_selftest import SELFTEST_TEXTS
from engine_adapter.engine.text.chat_template import ChatTemplate
from engine_adapter.engine.text.grammar import GrammarCompiler
from engine_adapter.engine.text.tokenizer import load_tokenizer
from engine_adapter.server.app import MAX_BODY_BYTES, build_app
from engine_adapter.server.memory_check import RESERVE_BYTES, TooLittleMemory, available_bytes, check_memory
from engine_adapter.server.metrics import WorkerMetrics
from engine_adapter.server.sampling_options import SamplingLimits
from engine_adapter.server.serving import Phase, ServerState, ServingContext
from paged_kv.layout import parse_kv_memory

logger = logging.getLogger(__name__)


class StartupFailed(Exception):
    """The worker cannot start; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The settings from the command line."""

    host: str = "127.0.0.1"
    port: int = 8001
    model: str | None = None
    model_names: tuple[str, ...]
    drain_timeout_s: float = 30.0
    max_queue_s: float = 120.0
    max_body_bytes: int = MAX_BODY_BYTES
    dies_with_parent: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)
    kv_memory: str | None = None  # a size or a share of the memory the weights leave free; overrides `engine`
    kv_events: KVEventConfig | None = None  # None: no events are published


def run_server(config: ServerConfig) -> int:
    """Serve until stopped; return the exit code.

    Raises:
        StartupFailed: port in use, no such model, too little memory.
    """
    if config.dies_with_parent:
        die_with_parent()
    listener = bind(config.host, config.port)
    return asyncio.run(WorkerServer(config, listener).run())


def bind(host: str, port: int) -> socket.socket:
    """Bind the port; requests are served later."""
    if not 0 <= port <= 65535:
        raise StartupFailed(f"cannot listen on port {port}: choose one between 1 and 65535, or 0")
    try:
        return socket.create_server((host, port), family=_family(host), backlog=1024)
    except OSError as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else error
        raise StartupFailed(f"cannot listen on {host}:{port} ({reason}): choose another --port") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def die_with_parent() -> None:
    """Ask Linux for a SIGTERM when the parent ends, so that a killed supervisor leaves no worker behind."""
    parent = os.getppid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != parent or parent == 1:  # it ended before the call
        raise StartupFailed("the parent process has ended")


class WorkerServer:
    """One run of the process. Belongs to one event loop."""

    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self.state = ServerState()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        app = build_app(self.state, max_body_bytes=self._config.max_body_bytes)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, self._listener).start()
        try:
            loaded = await self._first(self._load(loop), self._stop.wait())
            if not isinstance(loaded, ServingContext):
                _exit_at_once(0)  # stopped while loading: nothing to finish
                return 0
            return await self._serve(loaded)
        finally:
            await runner.cleanup()

    def _on_signal(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _serve(self, context: ServingContext) -> int:
        context.engine.start()
        await self._restore_pins(context)
        self.state.context, self.state.phase, self.state.detail = context, Phase.READY, "serving"
        print(self._ready_line(context), flush=True)
        await self._first(self._stop.wait(), context.engine.when_dead.wait())
        if context.engine.when_dead.is_set():
            self.state.phase, self.state.detail = Phase.DEAD, "the engine has stopped"
            logger.error("engine_dead_exiting")
            return 1
        self.state.phase, self.state.detail = Phase.DRAINING, "finishing running requests"
        await self._first(self.state.wait_idle(), self._hurry.wait(), timeout_s=self._config.drain_timeout_s)
        if self.state.num_in_flight:
            logger.warning("drain_cut_off requests=%d", self.state.num_in_flight)
        await context.engine.close()
        if context.kv_events is not None:
            await asyncio.to_thread(context.kv_events.stop)
        return 0

    async def _restore_pins(self, context: ServingContext) -> None:
        """Compute the pins of the manifest before requests compete for blocks."""
        self.state.detail = "restoring pins"
        is_restored = False
        while not is_restored and not self._stop.is_set():
            is_restored = await context.engine.call(
                lambda engine: engine.pins.is_restored or not engine.has_work
            )

    def _load(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[ServingContext]:
        """Load on a daemon thread, because torch cannot be interrupted."""
        future: asyncio.Future[ServingContext] = loop.create_future()

        def load() -> None:
            try:
                context = load_context(self._config, self._report)
            except Exception as error:
                loop.call_soon_threadsafe(future.set_exception, _startup_failure(error))
            else:
                loop.call_soon_threadsafe(future.set_result, context)

        threading.Thread(target=load, name="load", daemon=True).start()
        return future

    def _report(self, line: str) -> None:
        self.state.detail = line
        print(line, file=sys.stderr, flush=True)

    def _ready_line(self, context: ServingContext) -> str:
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        stats = context.engine.latest_stats
        took_s = time.time() - self.state.started_wall_s
        return (
            f"worker ready: {context.model_name} on http://{shown}:{port} "
            f"({str(self._config.engine.torch_dtype).removeprefix('torch.')}, "
            f"KV memory for {stats.num_blocks_total * stats.block_size} tokens, started in {took_s:.1f} s)"
        )

    @staticmethod
    async def _first(*awaitables: object, timeout_s: float | None = None) -> object:
        """Wait for the first to finish; return its result, or None on timeout. Cancels the others."""
        tasks = [asyncio.ensure_future(item) for item in awaitables]  # type: ignore[call-overload]  # mixed kinds
        try:
            done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return next((task.result() for task in tasks if task in done), None)
        finally:
            for task in tasks:
                task.cancel()


def load_context(config: ServerConfig, report: object = print) -> ServingContext:
    """Load the model and build the engine and everything around it. Blocking.

    Raises:
        ModelUnusable, TooLittleMemory, ValueError: see `_startup_failure`.
    """
    directory = prepare_model(config.model, report)  # type: ignore[arg-type]
    engine_config = _with_kv_memory(config, directory)
    loaded = load_model(directory, engine_config.torch_dtype)
    tokenizer = load_tokenizer(directory, loaded.config.eos_token_ids)
    events = None
    if config.kv_events is not None:
        events = KVEventPublisher(config.kv_events, block_size=engine_config.block_size)
        events.start()
    engine = AsyncEngine(
        LLMEngine(
            loaded,
            engine_config,
            selftest_prompts=[tokenizer.encode(text) for text in SELFTEST_TEXTS],
            observer=events,
        )
    )
    return ServingContext(
        engine=engine,
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer.files),
        grammars=GrammarCompiler(tokenizer, engine.vocab_size),
        limits=SamplingLimits(
            vocab_size=engine.vocab_size,
            context_tokens=engine.max_model_len,
            stop_token_ids=tokenizer.stop_token_ids,
            defaults=read_generation_defaults(directory),
        ),
        model_names=config.model_names,
        metrics=WorkerMetrics(config.model_names[0], lambda: engine.latest_stats),
        max_queue_s=config.max_queue_s,
        kv_events=events,
    )


def _with_kv_memory(config: ServerConfig, directory: Path) -> EngineConfig:
    """Set the size of the KV memory and check that it fits beside the weights."""
    engine = config.engine
    weight_bytes, available = _weight_bytes(directory), available_bytes(engine.device)
    if config.kv_memory is not None:
        free_bytes = max((available or 0) - weight_bytes - RESERVE_BYTES, 0)
        engine = replace(engine, kv_memory_bytes=parse_kv_memory(config.kv_memory, free_bytes=free_bytes))
    check_memory(
        weight_bytes=weight_bytes,
        kv_bytes=(0 if engine.num_kv_blocks else engine.kv_memory_bytes) + engine.tiers.host_bytes,
        available=available,
    )
    return engine


def _weight_bytes(directory: Path) -> int:
    """Memory of the weights: they keep the width they have in the files, whatever the compute dtype."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _startup_failure(error: Exception) -> Exception:
    """Turn expected errors into one line; any other keeps its traceback."""
    if isinstance(error, zmq.ZMQError):
        return StartupFailed(f"cannot publish KV events ({error}): choose another --kv-events endpoint")
    if isinstance(error, ModelUnusable | TooLittleMemory | ValueError):
        return StartupFailed(str(error))
    if isinstance(error, MemoryError):
        return StartupFailed("too little memory for the model: lower --kv-memory or use a smaller model")
    return error


def _exit_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
