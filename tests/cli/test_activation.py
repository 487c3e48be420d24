"""What a service manager gives and is told; sockets of other kinds."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fakes.gateway_process import GatewayProcess
from fakes.gateway_world import GatewayWorld, ProbedBackend

from gateway.process.listeners import open_tcp_sockets, open_unix_socket
from gateway.process.systemd import inherited_names, notify


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket on which systemd hears its services."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.setblocking(False)
        yield heard


async def hear(manager: socket.socket) -> dict[str, str]:
    async with asyncio.timeout(20):
        data = await asyncio.get_running_loop().sock_recv(manager, 4096)
    return dict(line.split("=", 1) for line in data.decode().splitlines())


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


async def test_sockets_come_from_the_service_manager(tmp_path: Path, manager: socket.socket) -> None:
    """It serves on both by name, says when it is ready, reloads and stops, and leaves the sockets open."""
    with listening() as data, listening() as admin:
        async with ProbedBackend() as backend:
            gateway = GatewayProcess(
                tmp_path,
                backends=[{"url": backend.base_url}],
                environ={"NOTIFY_SOCKET": str(tmp_path / "notify")},
            )
            gateway.sockets = {"admin": admin, "data": data}
            async with gateway:
                assert await hear(manager) == {"READY": "1"}
                assert (gateway.port, gateway.admin_port) == (data.getsockname()[1], admin.getsockname()[1])
                assert (await gateway.chat()).status_code == 200
                status = await gateway.client.get(f"http://127.0.0.1:{gateway.admin_port}/admin/v1/status")
                assert status.status_code == 200
                gateway.signal(signal.SIGHUP)
                told = await hear(manager)
                assert told["RELOADING"] == "1"
                assert int(told["MONOTONIC_USEC"]) > 0
                assert await hear(manager) == {"READY": "1"}
                gateway.signal(signal.SIGTERM)
                assert await hear(manager) == {"STOPPING": "1"}
                assert await gateway.wait_ended() == 0
                with socket.create_connection(data.getsockname()):
                    pass  # the next start finds this client in the queue


def test_descriptors_have_names() -> None:
    """By name; without one, or with that of the unit, in order: data, admin. Others' are left alone."""

    def names(**environ: str) -> dict[str, int]:
        return inherited_names({"LISTEN_PID": "7", **environ}, 7)

    assert names(LISTEN_FDS="2", LISTEN_FDNAMES="admin:data") == {"admin": 3, "data": 4}
    assert names(LISTEN_FDS="1", LISTEN_FDNAMES="homing.socket") == {"data": 3}
    assert names(LISTEN_FDS="2") == {"data": 3, "admin": 4}
    assert inherited_names({"LISTEN_PID": "7", "LISTEN_FDS": "1"}, 8) == {}
    assert inherited_names({}, 7) == {}


@pytest.mark.parametrize("given", ["data:data", "data:metrics", "data:admin:data"])
def test_names_that_are_not_understood_are_told(given: str) -> None:
    """Guessing which socket is the admin API would be dangerous."""
    environ = {"LISTEN_PID": "7", "LISTEN_FDS": str(given.count(":") + 1), "LISTEN_FDNAMES": given}
    with pytest.raises(ValueError, match="named data and admin"):
        inherited_names(environ, 7)


def test_a_manager_that_is_gone_is_no_trouble(tmp_path: Path) -> None:
    """Neither absent, nor closed, nor nonsense."""
    for address in ("", str(tmp_path / "absent"), "nonsense", "@homing-test-nobody"):
        notify("READY=1", {"NOTIFY_SOCKET": address})


async def test_a_unix_socket_serves_clients(tmp_path: Path) -> None:
    """`listen.unix_path` instead of a port; the file goes with the gateway."""
    path = tmp_path / "homing.sock"
    async with GatewayWorld(num_backends=1, listen={"unix_path": str(path)}) as world:
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://homing") as client:
            body = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}
            for _ in range(2):
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert world.gateway.port == 0
    assert not path.exists()


def test_a_stale_socket_file_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    """What a killed gateway left behind must not keep the next one from starting."""
    path = tmp_path / "homing.sock"
    open_unix_socket(path).close()
    assert path.is_socket()
    with open_unix_socket(path), pytest.raises(OSError, match="in use"):
        open_unix_socket(path)
    path.unlink()
    path.write_text("a file of somebody else's")
    with pytest.raises(OSError, match="in use"):
        open_unix_socket(path)
    assert path.read_text() == "a file of somebody else's"


async def test_every_address_of_a_name_has_a_socket() -> None:
    """Port 0 gives one port for all of them; a port in use leaves nothing open."""
    sockets = await open_tcp_sockets("localhost", 0, reuse_port=False)
    ports = {sock.getsockname()[1] for sock in sockets}
    assert len(ports) == 1
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="in use"):
        await open_tcp_sockets("localhost", ports.pop(), reuse_port=False)
    assert len(os.listdir("/proc/self/fd")) == before
    for sock in sockets:
        sock.close()
