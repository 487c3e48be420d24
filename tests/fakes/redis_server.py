"""Real Redis processes on loopback: one server, a server behind Sentinels, a Cluster.

Each process gets a free port and a folder of its own and ends with its owner. Nothing is written to disk
but the configuration that Sentinel and Cluster insist on.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

START_LIMIT_S = 20.0


def require_redis_server() -> str:
    """The path of redis-server. Without it: skip on a developer's machine, fail in CI."""
    path = shutil.which("redis-server")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("redis-server is not installed, and CI must run these tests")
        pytest.skip("redis-server is not installed")
    return path


def free_port() -> int:
    """A port nobody listens on just now, and neither on its neighbour above (a second process's admin port)
    and the one 10000 above (a Cluster node's bus).

    All three lie below the ports that the kernel gives to outgoing connections: one taken from there may be
    in use again by the time that a process wants to listen.
    """
    while True:
        port = 20_000 + secrets.randbelow(2_700)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for each in (port, port + 1, port + 10_000):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port


class RedisProcess:
    """One redis-server or redis-sentinel process."""

    def __init__(
        self, arguments: Sequence[str], port: int, folder: Path, password: str | None = None
    ) -> None:
        self.port = port
        self._arguments = list(arguments)
        self._folder = folder
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start, or start again on the same port, and wait until it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._arguments, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(lambda: b"PONG" in self.ask("PING"), f"redis on port {self.port} answers")

    def ask(self, *words: str) -> bytes:
        """One inline command over a fresh connection; empty if nobody listens."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                if self._password is not None:
                    connection.sendall(f"AUTH {self._password}\r\n".encode())
                    connection.recv(100)
                parts = [b"*%d\r\n" % len(words)]
                parts += [b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in words]
                connection.sendall(b"".join(parts))
                return connection.recv(65536)
        except OSError:
            return b""

    def pause(self) -> None:
        """Stop answering while connections stay open, like a paused container."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End at once: connections are reset, new ones refused."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = START_LIMIT_S) -> None:
    """Poll processes that offer no other way to be waited for."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {limit_s} s: {what}")
        time.sleep(0.02)


def start_server(folder: Path, *options: str, port: int | None = None) -> RedisProcess:
    """A server without persistence."""
    port = port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [
        require_redis_server(),
        *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
        *("--repl-diskless-sync-delay", "0", "--enable-debug-command", "yes"),
        *options,
    ]
    return RedisProcess(arguments, port, folder)


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisProcess]:
    """One server."""
    server = start_server(folder, *options)
    try:
        yield server
    finally:
        server.kill()


class SentinelSetup:
    """A master, a replica of it and three Sentinels that watch them."""

    def __init__(self, folder: Path) -> None:
        self.processes: list[RedisProcess] = []
        self.master = self._add(start_server(folder / "master"))
        self.replica = self._add(
            start_server(folder / "replica", "--replicaof", f"127.0.0.1 {self.master.port}")
        )
        wait_until(
            lambda: b"master_link_status:up" in self.replica.ask("INFO", "replication"), "replica in sync"
        )
        self.sentinels = [self._add(self._start_sentinel(folder / f"sentinel{n}")) for n in range(3)]
        wait_until(lambda: self._all_sentinels_say("num-other-sentinels", 2), "Sentinels know each other")
        wait_until(lambda: self._all_sentinels_say("num-slaves", 1), "Sentinels know the replica")

    def _all_sentinels_say(self, name: str, value: int) -> bool:
        fact = f"{name}\r\n$1\r\n{value}".encode()
        return all(fact in sentinel.ask("SENTINEL", "MASTERS") for sentinel in self.sentinels)

    def _add(self, process: RedisProcess) -> RedisProcess:
        self.processes.append(process)
        return process

    def _start_sentinel(self, folder: Path) -> RedisProcess:
        folder.mkdir()
        port = free_port()
        (folder / "sentinel.conf").write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor mymaster 127.0.0.1 {self.master.port} 2\n"
            "sentinel down-after-milliseconds mymaster 500\n"
            "sentinel failover-timeout mymaster 3000\n"
        )
        command = [require_redis_server(), str(folder / "sentinel.conf"), "--sentinel"]
        return RedisProcess(command, port, folder)


@contextlib.contextmanager
def redis_sentinels(folder: Path) -> Iterator[SentinelSetup]:
    """A watched pair. Killing `master` makes `replica` the master about two seconds later."""
    setup = SentinelSetup.__new__(SentinelSetup)
    setup.processes = []
    try:
        setup.__init__(folder)  # type: ignore[misc]  # so that a failed start still ends its processes
        yield setup
    finally:
        for process in setup.processes:
            process.kill()


class ClusterSetup:
    """Three masters and one replica of each."""

    def __init__(self, nodes: list[RedisProcess]) -> None:
        self.nodes = nodes

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(node.address for node in self.nodes)

    def has_failed_over(self, killed: RedisProcess) -> bool:
        """True once some other node says that all slots are served again."""
        witness = next(node for node in self.nodes if node is not killed)
        return b"cluster_state:ok" in witness.ask("CLUSTER", "INFO") and not any(
            str(killed.port).encode() in line and b"master" in line and b"fail" not in line
            for line in witness.ask("CLUSTER", "NODES").split(b"\n")
        )


@contextlib.contextmanager
def redis_cluster(folder: Path) -> Iterator[ClusterSetup]:
    """Six nodes, the first three of them masters."""
    nodes: list[RedisProcess] = []
    try:
        for number in range(6):
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
            nodes.append(start_server(folder / f"node{number}", *options))
        subprocess.run(
            [
                *("redis-cli", "--cluster", "create", *(node.address for node in nodes)),
                *("--cluster-replicas", "1", "--cluster-yes"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=30,
        )
        wait_until(
            lambda: all(b"cluster_state:ok" in n.ask("CLUSTER", "INFO") for n in nodes), "cluster is up"
        )
        wait_until(
            lambda: sum(b"master_link_status:up" in n.ask("INFO", "replication") for n in nodes) == 3,
            "replicas in sync",
        )
        yield ClusterSetup(nodes)
    finally:
        for node in nodes:
            node.kill()
