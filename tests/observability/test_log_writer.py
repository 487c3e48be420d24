"""Log lines go out whole and in order, and nobody waits for who reads them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from fakes.backend import FakeBackend, openai_answer
from fakes.gateway_process import GatewayProcess

from gateway.observability.log_writer import WHOLE_BYTES, LogWriter

F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ is not in Python 3.11's typeshed for every platform
LIMIT_S = 20.0


class Pipe:
    """A real pipe of one page, which is full after 4096 bytes."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, F_SETPIPE_SZ, 4096)

    def read_lines(self) -> list[bytes]:
        """All lines until the writing side is closed."""
        with os.fdopen(self.reading, "rb", closefd=False) as stream:
            return stream.read().splitlines()

    def close_writing(self) -> None:
        os.close(self.writing)
        self.writing = -1

    def close(self) -> None:
        for descriptor in (self.reading, self.writing):
            if descriptor >= 0:
                os.close(descriptor)


@contextmanager
def a_pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    try:
        yield pipe
    finally:
        pipe.close()


def lost(num_lines: int) -> bytes:
    return b"lost %d\n" % num_lines


def numbered(number: int) -> bytes:
    return b"%06d %s\n" % (number, b"x" * 200)


def test_no_line_is_lost_or_overtaken() -> None:
    """A reader that keeps up gets every line, in the order in which they were put."""
    with a_pipe() as pipe:
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.extend(pipe.read_lines()))
        reader.start()
        with LogWriter(pipe.writing, make_lost_line=lost) as writer:
            for number in range(5_000):
                writer.put(numbered(number))
        pipe.close_writing()
        reader.join(LIMIT_S)
        assert read == [numbered(number).rstrip() for number in range(5_000)]
        assert writer.num_lost == 0


def test_a_reader_that_sleeps_costs_lines_and_no_time() -> None:
    """Beyond the bound lines are lost and counted; the first come out, and then the number of the others."""
    with a_pipe() as pipe, LogWriter(pipe.writing, make_lost_line=lost, max_lines=100) as writer:
        for number in range(1_000):
            writer.put(numbered(number))  # returns: nobody reads
        num_lost = writer.num_lost
        assert num_lost >= 1_000 - 100 - 2 * WHOLE_BYTES // len(numbered(0))
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.extend(pipe.read_lines()))
        reader.start()
        writer.close(LIMIT_S)
        pipe.close_writing()
        reader.join(LIMIT_S)
        lines, told = read[: 1_000 - num_lost], read[1_000 - num_lost :]
        assert lines == [numbered(number).rstrip() for number in range(1_000 - num_lost)]
        assert told == [lost(num_lost).rstrip()]


def test_the_end_waits_for_nobody_for_ever() -> None:
    """A full pipe at the end of the process: closing gives up after its time."""
    with a_pipe() as pipe:
        with LogWriter(pipe.writing, make_lost_line=lost) as writer:
            for number in range(1_000):
                writer.put(numbered(number))
            writer.close(0.05)
            writer.close(0.05)
            os.close(pipe.reading)  # lets the thread end
            pipe.reading = -1
        assert writer.num_lost > 900


def test_a_reader_that_has_gone_loses_lines_only() -> None:
    """Each line that cannot be written is counted; who puts it does not notice."""
    with a_pipe() as pipe:
        os.close(pipe.reading)
        pipe.reading = -1
        with LogWriter(pipe.writing, make_lost_line=lost) as writer:
            for number in range(10):
                writer.put(numbered(number))
        assert writer.num_lost >= 10


def test_a_descriptor_that_does_not_block_is_waited_for() -> None:
    """Standard error is shared: another program may have made it non-blocking. No line is cut for that."""
    with a_pipe() as pipe:
        os.set_blocking(pipe.writing, False)
        read: list[bytes] = []
        with LogWriter(pipe.writing, make_lost_line=lost) as writer:
            for number in range(500):
                writer.put(numbered(number))
            reader = threading.Thread(target=lambda: read.extend(pipe.read_lines()))
            reader.start()
        pipe.close_writing()
        reader.join(LIMIT_S)
        assert read == [numbered(number).rstrip() for number in range(500)]


def test_two_processes_may_share_a_pipe() -> None:
    """What is written at once is small enough for the kernel to keep it whole."""
    with a_pipe() as pipe:
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.extend(pipe.read_lines()))
        reader.start()
        writers = [LogWriter(pipe.writing, make_lost_line=lost) for _ in range(2)]
        with writers[0], writers[1]:
            for number in range(2_000):
                writers[number % 2].put(numbered(number))
        pipe.close_writing()
        reader.join(LIMIT_S)
        assert sorted(read) == [numbered(number).rstrip() for number in range(2_000)]


async def test_a_log_that_nobody_reads_stops_no_request(tmp_path: Path) -> None:
    """A process whose standard error is a full pipe serves, streams, counts, and ends when told to."""
    backend = FakeBackend()
    backend.default = openai_answer("hello", cached_tokens=3)
    await backend.start()
    settings = [{"id": "b0", "url": backend.base_url, "engine": "vllm"}]
    gateway = GatewayProcess(tmp_path, backends=settings)
    with a_pipe() as pipe, socket.create_server(("127.0.0.1", 0)) as listening:
        gateway.sockets, gateway.log_to = {"data": listening}, pipe.writing
        base_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        gateway.start()
        try:
            async with asyncio.timeout(LIMIT_S), httpx.AsyncClient(base_url=base_url, timeout=10) as client:
                await until_ready(client)
                for number in range(60):  # four times what the pipe holds
                    assert (await ask(client, f"s{number}", is_stream=bool(number % 2))) == 200
                assert "homing_log_lines_lost_total 0.0" in (await client.get("/metrics")).text
            gateway.signal(signal.SIGTERM)
            assert await gateway.wait_ended() == 0
        finally:
            await gateway.client.aclose()
            if gateway.process.poll() is None:
                gateway.process.kill()
                gateway.process.wait()
            await backend.stop()


async def until_ready(client: httpx.AsyncClient) -> None:
    """Polls: the log, which would tell, is read by nobody."""
    while (await client.get("/readyz?min_backends=1")).status_code != 200:
        await asyncio.sleep(0.02)


async def ask(client: httpx.AsyncClient, session: str, *, is_stream: bool) -> int:
    body = {
        "model": "fake-model",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": is_stream,
    }
    answer = await client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
    return answer.status_code


def test_a_crash_is_told() -> None:
    """What was logged before an unforeseen end comes out, and so does its traceback."""
    program = (
        "from gateway.observability.log_writer import LogWriter\n"
        "from gateway.observability.logs import configure_logging, log_event, lost_line\n"
        "with LogWriter(make_lost_line=lost_line) as lines:\n"
        "    configure_logging('info', lines.put)\n"
        "    log_event('last_words')\n"
        "    raise RuntimeError('a bug')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=LIMIT_S)
    assert result.returncode == 1
    assert b'"event":"last_words"' in result.stderr.splitlines()[0]
    assert result.stderr.splitlines()[-1] == b"RuntimeError: a bug"
