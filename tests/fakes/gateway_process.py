"""`homing gateway` as an operator runs it: a process of its own, signals, and its log lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import yaml
from fakes.gateway_world import FAST_HEALTH

ROOT = Path(__file__).parents[2]
LIMIT_S = 30.0

# The descriptors that follow standard error are the listening sockets; exec keeps the process id.
_HAND_OVER = (
    'import os, sys; os.environ["LISTEN_PID"] = str(os.getpid()); os.execv(sys.argv[1], sys.argv[1:])'
)


class GatewayProcess:
    """`async with GatewayProcess(tmp_path, backends=[…]) as gateway:` starts it and waits for it."""

    def __init__(self, folder: Path, *, environ: dict[str, str] | None = None, **sections: Any) -> None:
        self.config_path = folder / "homing.yaml"
        self._log_path = folder / "log"
        self._environ = environ or {}
        self.sections: dict[str, Any] = {
            "listen": {"port": 0},
            "admin": {"port": 0},
            "health": FAST_HEALTH,
            "leaving_notice_s": 0.2,
            **sections,
        }
        self.write(**self.sections)
        self.sockets: dict[str, socket.socket] = {}  # handed over as the service manager does
        self.log_to: int | None = None  # a descriptor for standard error, instead of the file
        self.arguments: list[str] = []
        self.client = httpx.AsyncClient(timeout=10)
        self.process: subprocess.Popen[bytes]

    def write(self, **changes: Any) -> None:
        """The configuration file, in one step, with these sections changed."""
        self.sections |= changes
        draft = self.config_path.with_suffix(".draft")
        draft.write_text(yaml.safe_dump(self.sections))
        draft.replace(self.config_path)

    async def __aenter__(self) -> Self:
        self.start()
        await self.wait_for(lambda: self.events("gateway_started") != [])
        await self.wait_for(self._is_ready)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.client.aclose()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def start(self) -> None:
        command = [
            *(sys.executable, "-m", "gateway.main", "gateway", "--config", str(self.config_path)),
            *self.arguments,
        ]
        environ = {**os.environ, **self._environ}
        descriptors = [sock.fileno() for sock in self.sockets.values()]
        if self.sockets:
            environ |= {"LISTEN_FDS": str(len(descriptors)), "LISTEN_FDNAMES": ":".join(self.sockets)}
            command = [sys.executable, "-c", _HAND_OVER, *command]
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log if self.log_to is None else self.log_to,
                env=environ,
                pass_fds=range(3, 3 + len(descriptors)),
                preexec_fn=lambda: _renumber(descriptors),
            )

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Polls: a process offers no other way to be waited for."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not condition():
                    assert self.process.poll() is None, self._log_path.read_text()[-2000:]
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise AssertionError(self._log_path.read_text()[-2000:]) from error

    async def wait_ended(self) -> int:
        """The exit status."""
        async with asyncio.timeout(LIMIT_S):
            while self.process.poll() is None:
                await asyncio.sleep(0.02)
        return int(self.process.returncode)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log lines of this event."""
        found = []
        for line in self._log_path.read_bytes().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                if entry.get("event") == name:
                    found.append(entry)
        return found

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.base_url}/readyz?min_backends=1", timeout=5).status_code == 200
        return False

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        return int(self.events("gateway_started")[-1]["port"])

    @property
    def admin_port(self) -> int:
        return int(self.events("gateway_started")[-1]["admin_port"])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def reload(self) -> dict[str, Any]:
        """SIGHUP; returns the event that tells what became of it."""
        before = len(self._reload_events())
        self.signal(signal.SIGHUP)
        await self.wait_for(lambda: len(self._reload_events()) > before)
        return self._reload_events()[-1]

    def _reload_events(self) -> list[dict[str, Any]]:
        events = [*self.events("config_reloaded"), *self.events("config_rejected")]
        return sorted(events, key=lambda event: str(event["time"]))

    async def chat(self, session: str | None = None, **fields: Any) -> httpx.Response:
        headers = {"x-session-id": session} if session is not None else {}
        body = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post(f"{self.base_url}/v1/chat/completions", json=body, headers=headers)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that several processes may share (SO_REUSEPORT), and that nobody else gets meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _renumber(descriptors: list[int]) -> None:
    """In the child: the listening sockets become 3, 4, …"""
    copies = [os.dup(descriptor) for descriptor in descriptors]
    for number, copy in enumerate(copies):
        os.dup2(copy, 3 + number)
