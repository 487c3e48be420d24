"""`homing gateway`: run one gateway, or check its configuration."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
from pathlib import Path

import msgspec
import yaml

from gateway.commands.exits import UsageError
from gateway.config.config import Config, ConfigError, load_config, parse_config
from gateway.observability.log_writer import LogWriter
from gateway.observability.logs import configure_logging, log_event, lost_line
from gateway.observability.worker_reports import WorkerReports
from gateway.process.lifecycle import Launch, serve, stop_timeout_s
from gateway.process.listeners import CannotListen
from gateway.process.systemd import inherited_sockets
from gateway.process.workers import for_worker, run_workers

_PR_SET_PDEATHSIG = 1
WORKER_GRACE_S = 2.0
"""How long after its own deadline a process of `workers: N` is killed."""
_NO_BACKENDS = "add some with --backend URL, under `backends`, or with homing backends add"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="YAML configuration; every option has a default")
    parser.add_argument("--check", action="store_true", help="print the resolved configuration and exit")
    parser.add_argument("--host", help="overrides listen.host")
    parser.add_argument("--port", type=int, help="overrides listen.port")
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="URL",
        help="a backend (repeatable); replaces the backends in the file",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="record every decision and its inputs in FILE, for homing replay",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        metavar="S",
        help="overrides drain_timeout_s: time for running requests after SIGTERM",
    )
    parser.add_argument("--worker", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--shared-folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the parent process ends")


def run(options: argparse.Namespace) -> int:
    """Run or check one gateway. Raises UsageError for mistakes that the user can fix."""
    try:
        config = _resolve(options)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    if options.check:
        sys.stdout.write(resolved_yaml(config))
        return 0
    if options.record is not None:
        _check_writable(options.record)
    if options.die_with_parent:
        die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # held until a handler is installed
    raise_descriptor_limit()
    with LogWriter(make_lost_line=lost_line) as lines:
        configure_logging(config.log.level, lines.put)
        if options.worker is None and not config.backends and not config.fleet.discovery.has_sources:
            log_event("no_backends", level=logging.WARNING, advice=_NO_BACKENDS)
        return _run(config, options, lines)


def _run(config: Config, options: argparse.Namespace, lines: LogWriter) -> int:
    try:
        if config.workers > 1 and options.worker is None:
            return asyncio.run(
                run_workers(config.workers, stop_timeout_s=stop_timeout_s(config) + WORKER_GRACE_S)
            )
        return _serve(config, options, lines)
    except (ConfigError, ValueError, CannotListen) as error:
        raise UsageError(str(error)) from error


def _serve(config: Config, options: argparse.Namespace, lines: LogWriter) -> int:
    worker: int = options.worker or 0
    sockets = inherited_sockets(os.environ, is_worker=options.worker is not None)
    if worker and "admin" in sockets:  # only the first process uses it; the others open their own ports
        sockets.pop("admin").close()
    launch = Launch(
        load=lambda: for_worker(_resolve(options), worker),
        config_path=options.config,
        record_path=options.record,
        sockets=sockets,
        worker_reports=(
            None if options.shared_folder is None else WorkerReports(options.shared_folder, worker)
        ),
        lines=lines,
    )
    return serve(for_worker(config, worker), launch)


def _check_writable(path: Path) -> None:
    """Raise UsageError if the file cannot be written. Checked before any port is opened."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"--record: cannot write {path}: {error.strerror}") from error


def _resolve(options: argparse.Namespace) -> Config:
    """Return the configuration file's options, overridden by the command line. Raises ConfigError."""
    config = load_config(options.config)
    data = msgspec.to_builtins(config)
    if options.backend:
        data["backends"] = [{"url": url} for url in options.backend]
    if options.host is not None:
        data["listen"]["host"] = options.host
    if options.port is not None:
        data["listen"]["port"] = options.port
    if options.drain_timeout is not None:
        data["drain_timeout_s"] = options.drain_timeout
    return parse_config(data)


def resolved_yaml(config: Config) -> str:
    """Return the configuration with all defaults filled in. It names variables of secrets, never secrets."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    A request needs two descriptors, so the usual soft limit of 1,024 would stop a gateway at 480 clients.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def die_with_parent() -> None:
    """Ask the kernel (Linux only) to send SIGTERM to this process when its parent ends."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call took effect
        raise SystemExit(0)
