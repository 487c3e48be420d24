"""What arrives in one turn of the loop is taken stage by stage, and nothing is lost or reordered by it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest
from fakes.gateway_world import GatewayWorld

from gateway.request.proxy import Proxy
from gateway.scheduling.round_protocol import LARGE_READ_BYTES, RoundProtocol
from gateway.scheduling.rounds import Rounds, Stage, rounds_of_loop


class Socket(RoundProtocol):
    """Writes down what it is given to read."""

    def __init__(self, rounds: Rounds, log: list[bytes]) -> None:
        super().__init__(rounds, Stage.ANSWERS)
        self.log = log
        self.is_aborted = False

    def read(self, data: bytes) -> None:
        if data == b"fault":
            raise RuntimeError("a fault of our own")
        self.log.append(data)

    def abort(self) -> None:
        self.is_aborted = True


async def test_stages_come_in_order_whatever_the_order_of_arrival() -> None:
    """All of one stage, then all of the next."""
    rounds, log = Rounds(), list[str]()
    for number in range(3):
        for stage in reversed(Stage):
            rounds.add(stage, partial(log.append, f"{stage.name}{number}"))
    assert not log
    await asyncio.sleep(0)
    assert log == [f"{stage.name}{number}" for stage in Stage for number in range(3)]


async def test_what_a_stage_adds_for_a_later_one_belongs_to_the_same_round() -> None:
    """And what it adds for itself or an earlier one to the next, which follows by itself."""
    rounds, log = Rounds(), list[str]()

    def answers() -> None:
        log.append("answers")
        rounds.add(Stage.TURNS, lambda: log.append("turns"))
        if len(log) < 3:
            rounds.add(Stage.ANSWERS, answers)

    rounds.add(Stage.ANSWERS, answers)
    await asyncio.sleep(0)
    assert log == ["answers", "turns"]
    await asyncio.sleep(0)
    assert log == ["answers", "turns", "answers", "turns"]


async def test_a_fault_in_one_connection_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It is cut off, and its fault is in the log."""
    rounds, log = Rounds(), list[bytes]()
    first, broken, last = (Socket(rounds, log) for _ in range(3))
    first.data_received(b"1")
    broken.data_received(b"fault")
    last.data_received(b"3")
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(0)
    assert log == [b"1", b"3"]
    assert [one.is_aborted for one in (first, broken, last)] == [False, True, False]
    assert "a fault of our own" in caplog.text


async def test_bytes_are_read_once_and_in_order() -> None:
    """Those of several reads together; a large read takes what came before it along, at once."""
    rounds, log = Rounds(), list[bytes]()
    socket = Socket(rounds, log)
    socket.data_received(b"a")
    socket.data_received(b"b")
    socket.read_arrived()  # as at the end of a connection
    assert log == [b"ab"]
    socket.data_received(b"c")
    large = b"x" * LARGE_READ_BYTES
    socket.data_received(large)
    assert log == [b"ab", b"c" + large]
    socket.data_received(b"d")
    await asyncio.sleep(0)
    assert log == [b"ab", b"c" + large, b"d"]


async def test_each_loop_has_its_own() -> None:
    """And always the same."""
    assert rounds_of_loop() is rounds_of_loop()


async def test_requests_that_arrive_together_take_their_steps_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of forty requests at once most share a round, and each gets its own answer."""
    batches: list[int] = []
    advance = Proxy._advance

    def counted(proxy: Proxy) -> None:
        batches.append(len(proxy._ready))
        advance(proxy)

    monkeypatch.setattr(Proxy, "_advance", counted)
    async with GatewayWorld(2) as world:
        await asyncio.gather(*(world.chat(f"s-{number}") for number in range(40)))
        batches.clear()
        answers = await asyncio.gather(*(world.chat(f"s-{number}") for number in range(40)))
        assert {answer.headers["x-homing-affinity"] for answer in answers} == {"hit"}
        assert sum(batches) == 40
        assert max(batches) > 1
        world.assert_idle()
