"""Large bodies go through a helper process: the same facts and errors, and what happens when it is gone."""

from __future__ import annotations

import asyncio
import gzip
import json
import multiprocessing
import multiprocessing.spawn
import os
import signal
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.gateway_world import GatewayWorld

from gateway.errors import BodyTooLarge, Overloaded
from gateway.request.body_helper import BodyHelper, FactsReader, ParserPlan
from gateway.values import Api, RequestFacts
from gateway.wire.facts import ParseOptions
from gateway.wire.settings import KeySettings

CHAT = "/v1/chat/completions"
PLAN = ParserPlan(settings=KeySettings(), secret=b"test secret", max_decoded_bytes=1 << 26)
SMALL_LIMIT: dict[str, Any] = {"max_inline_body_bytes": 2_000}


def _options(content_encoding: str | None = None) -> ParseOptions:
    return {"tenant": "t", "path": CHAT, "query": "", "content_encoding": content_encoding}


@pytest.fixture
async def reader() -> AsyncIterator[FactsReader]:
    helper = BodyHelper()
    yield FactsReader(PLAN, helper, inline_bytes=1_000, is_suspect=lambda *_: True)
    await helper.close()
    assert multiprocessing.active_children() == []


async def read(
    reader: FactsReader, api: Api, headers: list[tuple[bytes, bytes]], body: bytes, options: ParseOptions
) -> RequestFacts:
    """As a request does: here if the body is small, else in the other process."""
    facts = reader.read_here(api, headers, body, options)
    return facts if facts is not None else await reader.read_apart(api, headers, body, options)


def _body(**fields: Any) -> bytes:
    turns = [{"role": "user", "content": f"turn {number} " * 50} for number in range(20)]
    return json.dumps({"model": "fake-model", "messages": turns} | fields).encode()


async def test_facts_are_the_same_in_either_place(reader: FactsReader) -> None:
    """Keys, prefix and sizes do not depend on where the body was parsed, plain or compressed."""
    here = reader.parser
    headers = [(b"X-Session-Id", b"s-1")]
    for api in (Api.CHAT, Api.MESSAGES, Api.GENERATE):
        body = _body(system="be brief", text="x" * 5_000)
        there = await read(reader, api, headers, body, _options())
        assert there == here.parse(api, headers, body, **_options())
        compressed = await read(reader, api, [], gzip.compress(body), _options("gzip"))
        assert compressed == here.parse(api, [], body, **_options())


@pytest.mark.parametrize(
    ("api", "padding", "content_encoding", "is_large"),
    [
        (Api.CHAT, 500, None, False),
        (Api.CHAT, 1_000, None, True),
        (Api.CHAT, 0, "identity", True),
        (Api.OTHER, 1_000, None, True),
        (Api.MODELS, 1_000, None, False),
    ],
)
async def test_only_what_takes_long_starts_the_process(
    reader: FactsReader, api: Api, padding: int, content_encoding: str | None, is_large: bool
) -> None:
    """An encoded body is judged by the most that may come out of it; one that tells nothing is not read."""
    body = b'{"model":"m","messages":[]%b}' % (b" " * padding)
    await read(reader, api, [], body, _options(content_encoding))
    assert bool(multiprocessing.active_children()) is is_large


async def test_no_part_of_a_body_stays_when_it_has_been_read(reader: FactsReader) -> None:
    """Neither the body nor the copy that went to the other process is held until the next one comes."""
    await read(reader, Api.CHAT, [], _body(), _options())  # starts the process
    body_bytes = 8_000_000
    tracemalloc.start()
    try:
        await read(reader, Api.CHAT, [], _body(text="x" * body_bytes), _options())
        async with asyncio.timeout(30):
            while tracemalloc.get_traced_memory()[0] > body_bytes // 2:
                await asyncio.sleep(0.01)
    finally:
        tracemalloc.stop()


async def test_a_large_body_is_routed_and_forwarded_as_received() -> None:
    """Its session key works, and the backend gets every byte."""
    async with GatewayWorld(3, downstream=SMALL_LIMIT) as world:
        body = _body()
        for _ in range(4):
            answer = await world.client.post(CHAT, content=body, headers={"x-session-id": "s-1"})
            assert answer.status_code == 200
        small = await world.chat("s-1")
        assert small.headers["x-homing-affinity"] == "hit"
        assert len(world.served()) == 1
        sent = [one.body for backend in world.backends for one in backend.requests]
        assert sent[:4] == [body] * 4
    assert multiprocessing.active_children() == []


async def test_nobody_waits_for_a_large_body_but_its_sender() -> None:
    """B85: while one is being parsed, as long as that takes, all others are served."""
    async with GatewayWorld(1, downstream=SMALL_LIMIT) as world:
        assert (await world.client.post(CHAT, content=_body())).status_code == 200
        (process,) = multiprocessing.active_children()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        waiting = asyncio.ensure_future(world.client.post(CHAT, content=_body()))
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 1)
        for _ in range(5):
            assert (await world.chat(stream=True)).status_code == 200
        assert not waiting.done()
        os.kill(process.pid, signal.SIGCONT)
        assert (await waiting).status_code == 200


async def test_long_conversations_pass_whole() -> None:
    """B37: 1.3 MB and 20 MB, sized and in chunks, with the default limits; 95 MB is too much."""
    async with GatewayWorld(1) as world:
        for num_bytes in (1_300_000, 20_000_000):
            body = _body(padding="x" * num_bytes)

            async def pieces(body: bytes = body) -> AsyncIterator[bytes]:
                for at in range(0, len(body), 1 << 20):
                    yield body[at : at + (1 << 20)]

            for content in (body, pieces()):
                assert (await world.client.post(CHAT, content=content)).status_code == 200
                assert world.backends[0].requests[-1].body == body
            world.backends[0].requests.clear()
        refused = await world.client.post(CHAT, content=b"x" * 95_000_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")


async def test_errors_of_large_bodies_are_those_of_small_ones() -> None:
    """400 with the field, 413 for a bomb: an error crosses the process boundary whole."""
    async with GatewayWorld(1, downstream=SMALL_LIMIT | {"max_body_bytes": 3_000_000}) as world:
        wrong = await world.client.post(CHAT, content=_body(stream="yes"))
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "stream")
        torn = await world.client.post(CHAT, content=_body()[:-1])
        assert (torn.status_code, torn.json()["error"]["type"]) == (400, "invalid_request_error")
        bomb = gzip.compress(b'{"model":"fake-model","messages":[]}' + b" " * 4_000_000)
        refused = await world.client.post(CHAT, content=bomb, headers={"content-encoding": "gzip"})
        assert refused.status_code == 400  # it grew more than MAX_RATIO times
        assert not world.served()


async def test_a_helper_that_dies_costs_one_answer() -> None:
    """503 to who waits for it, with Retry-After; the next body starts a new one."""
    async with GatewayWorld(1, downstream=SMALL_LIMIT) as world:
        assert (await world.client.post(CHAT, content=_body())).status_code == 200
        (process,) = multiprocessing.active_children()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)  # it dies with a body in its hands
        waiting = asyncio.ensure_future(world.client.post(CHAT, content=_body()))
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 1)
        os.kill(process.pid, signal.SIGKILL)
        lost = await waiting
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "overloaded")
        assert lost.headers["retry-after"] == "1"
        assert (await world.client.post(CHAT, content=_body())).status_code == 200
        world.assert_idle()


async def test_an_overdue_helper_is_replaced() -> None:
    """S04: the body that holds it costs its own request a 503; those behind it are read, by a new helper."""
    helper = BodyHelper(read_timeout_s=1.0)
    reader = FactsReader(PLAN, helper, inline_bytes=1_000, is_suspect=lambda *_: False)
    try:
        await read(reader, Api.CHAT, [], _body(), _options())
        (held,) = multiprocessing.active_children()
        assert held.pid is not None
        os.kill(held.pid, signal.SIGSTOP)
        first, *others = await asyncio.gather(
            *[read(reader, Api.CHAT, [], _body(), _options()) for _ in range(3)], return_exceptions=True
        )
        assert isinstance(first, Overloaded)
        assert "within 1 s" in str(first)
        assert [one.model for one in others if isinstance(one, RequestFacts)] == ["fake-model"] * 2
        assert held not in multiprocessing.active_children()
    finally:
        await helper.close()


async def test_a_client_that_leaves_does_not_let_its_body_be_joined() -> None:
    """The helper reads on, so the next body waits for it; nor does a wave of leaving clients restart it."""
    helper = BodyHelper(read_timeout_s=30.0)
    reader = FactsReader(PLAN, helper, inline_bytes=1_000, is_suspect=lambda *_: False)
    try:
        await read(reader, Api.CHAT, [], _body(), _options())
        (process,) = multiprocessing.active_children()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        leaving = [asyncio.ensure_future(read(reader, Api.CHAT, [], _body(), _options())) for _ in range(3)]
        await asyncio.sleep(0.05)
        for one in leaving:
            one.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        staying = asyncio.ensure_future(read(reader, Api.CHAT, [], _body(), _options()))
        await asyncio.sleep(0.05)
        assert not staying.done()
        os.kill(process.pid, signal.SIGCONT)
        assert (await staying).model == "fake-model"
        assert multiprocessing.active_children() == [process]
    finally:
        await helper.close()


async def test_closing_waits_for_no_body() -> None:
    """S04: a helper that is held is killed."""
    helper = BodyHelper()
    reader = FactsReader(PLAN, helper, inline_bytes=1_000, is_suspect=lambda *_: False)
    await read(reader, Api.CHAT, [], _body(), _options())
    (process,) = multiprocessing.active_children()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    reading = asyncio.ensure_future(read(reader, Api.CHAT, [], _body(), _options()))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await helper.close()
    assert multiprocessing.active_children() == []
    with pytest.raises(Overloaded):
        await reading


async def test_a_refused_bomb_leaves_the_helper_small(reader: FactsReader) -> None:
    """It once took 529 MB there to find that a body is too large."""
    await read(reader, Api.CHAT, [], _body(), _options())
    (process,) = multiprocessing.active_children()
    before_kb = _peak_kb(process.pid)
    bomb = gzip.compress(bytes(PLAN.max_decoded_bytes + (8 << 20)), 1) + b"x" * (1 << 20)
    with pytest.raises(BodyTooLarge):
        await read(reader, Api.CHAT, [], bomb, _options("gzip"))
    assert _peak_kb(process.pid) - before_kb < (PLAN.max_decoded_bytes + (32 << 20)) // 1024


def _peak_kb(pid: int | None) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


@pytest.fixture
def no_process_can_be_started() -> Iterator[None]:
    """As where the number of processes is limited: the interpreter to start cannot be found."""
    multiprocessing.spawn.set_executable("/nonexistent/python")
    yield
    multiprocessing.spawn.set_executable(sys.executable)


@pytest.mark.usefixtures("no_process_can_be_started")
async def test_without_a_helper_bodies_are_parsed_here(reader: FactsReader) -> None:
    """A gateway that may start no process serves large bodies all the same."""
    here = reader.parser
    for _ in range(2):
        assert await read(reader, Api.CHAT, [], _body(), _options()) == here.parse(
            Api.CHAT, [], _body(), **_options()
        )


OWNER = """
import asyncio, multiprocessing, sys
from gateway.request.body_helper import BodyHelper, FactsReader, ParserPlan
from gateway.values import Api
from gateway.wire.settings import KeySettings

async def main():
    plan = ParserPlan(settings=KeySettings(), secret=b"s", max_decoded_bytes=1 << 20)
    reader = FactsReader(plan, BodyHelper(), inline_bytes=1, is_suspect=lambda *_: False)
    options = {"tenant": "t", "path": "", "query": "", "content_encoding": None}
    await reader.read_apart(Api.CHAT, [], b'{"model":"m","messages":[]}', options)
    print(multiprocessing.active_children()[0].pid, flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_a_gateway_that_is_killed_leaves_no_helper(tmp_path: Path) -> None:
    """SIGTERM to the helper alone does nothing, the death of its gateway ends it."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = await asyncio.create_subprocess_exec(
        sys.executable, script, stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    os.kill(pid, signal.SIGTERM)
    assert owner.returncode is None
    owner.kill()
    await owner.wait()
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
            await asyncio.sleep(0.02)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
