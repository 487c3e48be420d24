"""Real HAProxy and nginx processes with the configurations of `deploy/proxies`, on loopback.

Only addresses and ports are replaced; whatever else a test sees is what users get.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROXIES = Path(__file__).parents[2] / "deploy" / "proxies"
START_LIMIT_S = 20.0


def require(program: str) -> str:
    """The path of a program. Without it: skip on a developer's machine, fail in CI."""
    path = shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail(f"{program} is not installed, and CI must run these tests")
        pytest.skip(f"{program} is not installed")
    return path


@contextlib.contextmanager
def haproxy(port: int, gateway_ports: tuple[int, int], folder: Path) -> Iterator[str]:
    """HAProxy on `port` in front of two gateways; gives its base url."""
    command = [require("haproxy"), "-W", "-f", str(PROXIES / "haproxy.cfg")]
    addresses = {
        "BIND": f"127.0.0.1:{port}",
        "GATEWAY_1": f"127.0.0.1:{gateway_ports[0]}",
        "GATEWAY_2": f"127.0.0.1:{gateway_ports[1]}",
    }
    with _running(command, port, folder, os.environ | addresses):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def nginx(port: int, gateway_ports: tuple[int, int], folder: Path) -> Iterator[str]:
    """nginx on `port` in front of two gateways; gives its base url."""
    site = (PROXIES / "nginx.conf").read_text()
    for written, actual in (("8080", port), ("8000", gateway_ports[0]), ("8010", gateway_ports[1])):
        assert site.count(f"127.0.0.1:{written}") == 1
        site = site.replace(f"127.0.0.1:{written}", f"127.0.0.1:@{actual}")
    (folder / "site.conf").write_text(site.replace("127.0.0.1:@", "127.0.0.1:"))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\nevents {{}}\n"
        f"http {{ access_log off; {temporary} include {folder}/site.conf; }}\n"
    )
    command = [require("nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with _running(command, port, folder, dict(os.environ)):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _running(command: list[str], port: int, folder: Path, environ: dict[str, str]) -> Iterator[None]:
    log_path = folder / f"{Path(command[0]).name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_listening(process, port, log_path)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_listening(process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    pytest.fail(f"{process.args!r} does not listen:\n{log_path.read_text()}")
