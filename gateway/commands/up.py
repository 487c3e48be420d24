"""`homing up`: a small fleet on this machine. Starts, supervises and stops a gateway and its workers.

Each child runs in its own session, so Ctrl-C reaches only the supervisor, which then stops the children in
order: the gateway first (it finishes running answers), then the workers. A child that dies is restarted on
the same port, after a growing pause. Children ask the kernel to end them with their parent, so even `kill -9`
of the supervisor leaves no process behind.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console

from gateway.commands.exits import UsageError
from gateway.config.config import ConfigError, load_config, parse_config

STOP_TIMEOUT_S = 8.0
RESTART_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_AFTER_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", type=int, default=2, metavar="N", help="number of workers (default 2)")
    parser.add_argument("--host", default="127.0.0.1", help="address of the gateway (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port of the gateway (default 8000)")
    parser.add_argument("--admin-port", type=int, default=8001, help="port of the admin API (default 8001)")
    parser.add_argument(
        "--worker-port", type=int, default=8101, metavar="PORT", help="first worker's port (default 8101)"
    )
    parser.add_argument(
        "--model", metavar="PATH", help="a Llama-family checkpoint: Hugging Face directory or .gguf file"
    )
    parser.add_argument("--config", type=Path, help="base configuration of the gateway (YAML)")
    parser.add_argument("--policy", help="routing policy (default: homing)")
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path(".homing"),
        help="directory for logs and the generated configuration",
    )
    parser.add_argument(
        "--worker-args",
        default="",
        metavar="ARGS",
        help="additional options for each worker, as one string; {name} is replaced by the worker's name",
    )


@dataclass(slots=True, kw_only=True)
class Child:
    """One supervised process."""

    name: str
    command: list[str]
    ready_url: str
    log_path: Path
    process: asyncio.subprocess.Process | None = None
    started_s: float = 0.0
    num_restarts: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    async def start(self) -> None:
        self.started_s = time.monotonic()
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when the ready path answers. Raises UsageError with the last log line if the child ends."""
        assert self.process is not None
        deadline_s = time.monotonic() + timeout_s
        async with httpx.AsyncClient(timeout=2.0) as client:
            while time.monotonic() < deadline_s:
                if self.process.returncode is not None:
                    raise UsageError(f"{self.name} failed to start: {self.last_words()}")
                try:
                    if (await client.get(self.ready_url)).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
        raise UsageError(f"{self.name} was not ready within {timeout_s:.0f} s; see {self.log_path}")

    async def stop(self) -> None:
        process = self.process
        if process is None or process.returncode is not None:
            return
        for number, timeout_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, STOP_TIMEOUT_S)):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                return
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
                return
            except TimeoutError:
                continue

    def last_words(self) -> str:
        """Return the last line of the child's log."""
        try:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1][:500] if lines else f"no output; see {self.log_path}"


class Supervisor:
    """Keeps the children running until a signal stops it."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options, self._console = options, console
        self._run_dir: Path = options.run_dir
        self._workers: list[Child] = []
        self._gateway: Child | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stopping.set)
        keepers: list[asyncio.Task[None]] = []
        try:
            started = asyncio.ensure_future(self._start_all())
            stop = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait({started, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                started.cancel()
                await asyncio.gather(started, return_exceptions=True)
                return 0
            started.result()
            self._say_what_runs()
            keepers = [asyncio.ensure_future(self._keep(child)) for child in self._children()]
            await stop
            return 0
        finally:
            for keeper in keepers:
                keeper.cancel()
            await self._stop_all()

    def _children(self) -> list[Child]:
        return ([self._gateway] if self._gateway else []) + self._workers

    # -- start

    async def _start_all(self) -> None:
        options = self._options
        _check_port(options.host, options.port, "--port")
        _check_port("127.0.0.1", options.admin_port, "--admin-port")
        self._run_dir.mkdir(parents=True, exist_ok=True)
        ports = _free_ports(options.worker_port, options.backends, {options.port, options.admin_port})
        gateway = self._make_gateway(ports)
        await self._prepare_model()
        self._workers = [self._worker(number, port) for number, port in enumerate(ports)]
        for child in self._workers:
            child.log_path.unlink(missing_ok=True)
            await child.start()
        with self._console.status(f"Starting {len(ports)} workers (loading the model) …"):
            for child in self._workers:
                await child.wait_ready(300.0)
                self._console.print(f"  {child.name} is ready on port {child.ready_url.split(':')[2][:-6]}")
        self._gateway = gateway
        gateway.log_path.unlink(missing_ok=True)
        await gateway.start()
        with self._console.status("Starting the gateway …"):
            await gateway.wait_ready(60.0)

    async def _prepare_model(self) -> None:
        """Fetch and convert the default model once, with progress on this terminal."""
        if self._options.model is not None:
            return
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "engine_adapter.engine.checkpoint.model_store"),
            stdout=asyncio.subprocess.DEVNULL,  # the path, for scripts; progress goes to standard error
        )
        try:
            if await process.wait() != 0:
                raise UsageError("could not prepare the default model; see above")
        except asyncio.CancelledError:
            process.terminate()
            await process.wait()
            raise

    def _worker(self, number: int, port: int) -> Child:
        name = f"worker-{number}"
        command = [sys.executable, "-m", "engine_adapter.server", "--host", "127.0.0.1", "--port", str(port)]
        if self._options.model is not None:
            command += ["--model", str(self._options.model)]
        command += [*self._options.worker_args.replace("{name}", name).split(), "--die-with-parent"]
        return Child(
            name=name,
            command=command,
            ready_url=f"http://127.0.0.1:{port}/ready",
            log_path=self._run_dir / f"{name}.log",
        )

    def _make_gateway(self, ports: list[int]) -> Child:
        """Write the gateway's configuration file. Raises UsageError if the configuration is invalid."""
        options = self._options
        try:
            load_config(options.config)
            config = yaml.safe_load(options.config.read_text()) or {} if options.config else {}
            self._fill_in(config, ports)
            parse_config(config)
        except ConfigError as error:
            raise UsageError(str(error)) from error
        path = self._run_dir / "homing.yaml"
        path.write_text("# Written by `homing up`.\n" + yaml.safe_dump(config, sort_keys=False))
        command = [
            *(sys.executable, "-m", "gateway.main", "gateway"),
            *("--config", str(path), "--die-with-parent"),
        ]
        return Child(
            name="gateway",
            command=command,
            ready_url=f"http://{options.host}:{options.port}/readyz?min_backends=1",
            log_path=self._run_dir / "gateway.log",
        )

    def _fill_in(self, config: dict[str, Any], ports: list[int]) -> None:
        """Override the file's options with the addresses, ports and policy of this fleet."""
        options = self._options
        config["listen"] = {"host": options.host, "port": options.port}
        config["admin"] = {**config.get("admin", {}), "port": options.admin_port}
        config["backends"] = [
            {"id": f"worker-{number}", "url": f"http://127.0.0.1:{port}", "engine": "torch"}
            for number, port in enumerate(ports)
        ]
        if options.policy:
            config["routing"] = {**config.get("routing", {}), "policy": options.policy}

    # -- supervise

    async def _keep(self, child: Child) -> None:
        """Restart `child` whenever it ends, until cancelled."""
        while True:
            assert child.process is not None
            status = await child.process.wait()
            if time.monotonic() - child.started_s > STABLE_AFTER_S:
                child.num_restarts = 0
            pause_s = RESTART_PAUSES_S[min(child.num_restarts, len(RESTART_PAUSES_S) - 1)]
            how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
            self._console.print(f"[yellow]{child.name} {how}; restarting it in {pause_s:g} s[/yellow]")
            await asyncio.sleep(pause_s)
            child.num_restarts += 1
            await child.start()
            try:
                await child.wait_ready(300.0)
                self._console.print(f"[green]{child.name} is back[/green]")
            except UsageError as error:
                self._console.print(f"[red]{error}[/red]")

    async def _stop_all(self) -> None:
        children = self._children()
        if not any(child.process and child.process.returncode is None for child in children):
            return
        self._console.print("Stopping …")
        if self._gateway is not None:
            await self._gateway.stop()
        await asyncio.gather(*(child.stop() for child in self._workers))
        self._console.print("Stopped.")

    def _say_what_runs(self) -> None:
        options = self._options
        base = f"http://{options.host}:{options.port}"
        workers = ", ".join(f"{child.name} ({child.ready_url[7:-6]})" for child in self._workers)
        self._console.print(
            f"""
[bold]Homing is running.[/bold]
  gateway    {base}   (OpenAI-compatible; admin API on 127.0.0.1:{options.admin_port})
  workers    {workers}
  dashboard  http://127.0.0.1:{options.admin_port}/admin/
  logs       {self._run_dir}/

Try, in another terminal:
  curl -s {base}/v1/chat/completions -H 'content-type: application/json' -H 'x-session-id: alice' -i \\
    -d '{{"model": "smollm2-135m-instruct", "messages": [{{"role": "user", "content": "What is a llama?"}}]}}'
  .venv/bin/homing status
  .venv/bin/python examples/chat.py

Stop with Ctrl-C.""",
            highlight=False,
            soft_wrap=True,
        )


def _check_port(host: str, port: int, option: str) -> None:
    """Raise UsageError if the port cannot be used."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}. Stop what uses it, or change {option}"
        ) from error


def _free_ports(first: int, count: int, taken: set[int]) -> list[int]:
    """Return the first `count` free loopback ports, starting at `first`."""
    ports: list[int] = []
    for port in range(first, min(first + 1000, 65536)):
        if len(ports) == count:
            break
        if port in taken:
            continue
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        ports.append(port)
    if len(ports) < count:
        raise UsageError(f"fewer than {count} ports are free from {first} on; change --worker-port")
    return ports


def run(options: argparse.Namespace) -> int:
    """Run the fleet until it is stopped. Raises UsageError for mistakes that the user can fix."""
    if options.backends < 1:
        raise UsageError("--backends must be at least 1")
    if options.model is not None and not Path(options.model).exists():
        raise UsageError(f"no model at {options.model}: set --model to an existing path")
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("tokenizers") is None:
        raise UsageError("the worker needs torch: pip install 'homing[engine]'")
    return asyncio.run(Supervisor(options, Console(highlight=False)).run())
