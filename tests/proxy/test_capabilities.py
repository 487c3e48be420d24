"""Alive is not able: requests go where they fit, and where somebody is awake."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from fakes.backend import Turn, chat_body, respond
from fakes.gateway_world import GatewayWorld, ProbedBackend

from gateway.values import BackendId, BackendState


class Limited:
    """Makes a backend an engine with a context length, which its list of models tells."""

    def __init__(self, backend: ProbedBackend, context_tokens: int, **card: Any) -> None:
        self.context_tokens = context_tokens
        backend.model_card = {"id": backend.model, "max_model_len": context_tokens, **card}
        backend.default = self.answer

    async def answer(self, turn: Turn) -> None:
        body = turn.request.json
        prompt = sum(len(str(message["content"])) for message in body["messages"]) // 4
        if prompt + body.get("max_tokens", 1) > self.context_tokens:
            error = {"error": {"message": "This model's maximum context length is …", "code": 400}}
            await respond(json.dumps(error).encode(), status=400, reason="Bad Request")(turn)
            return
        usage: dict[str, object] = {"prompt_tokens": prompt, "completion_tokens": 5}
        await respond(json.dumps(chat_body("ok", usage, turn.backend.model)).encode())(turn)


def text(name: str, num_tokens: int) -> str:
    return (f"{name} " * num_tokens)[: 4 * num_tokens]


@pytest.fixture
def lengths() -> tuple[int, ...]:
    return 4_096, 32_768


async def two_lengths(world: GatewayWorld, lengths: tuple[int, ...]) -> None:
    for backend, length in zip(world.backends, lengths, strict=True):
        Limited(backend, length)
    await world.gateway.prober.list_anew()
    await world.wait_for(
        lambda: all(one.context_tokens for one in world.gateway.fleet.view.backends.values())
    )


async def test_a_prompt_goes_where_it_fits(lengths: tuple[int, ...]) -> None:
    """N16: ten prompts of 10,000 tokens; the shorter engine would refuse them. Short ones use both."""
    async with GatewayWorld(num_backends=2) as world:
        await two_lengths(world, lengths)
        answers = [await world.chat(f"short-{number}", max_tokens=100) for number in range(20)]
        assert {answer.headers["x-homing-backend"] for answer in answers} == {"b0", "b1"}
        for number in range(10):
            messages = [{"role": "user", "content": text(f"long-{number}", 10_000)}]
            answer = await world.chat(f"long-{number}", messages=messages)
            assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, "b1")
        wide = await world.chat("wide", max_tokens=10_000)
        assert (wide.status_code, wide.headers["x-homing-backend"]) == (200, "b1")


async def test_a_session_that_outgrows_its_home_moves_before_it_fails(lengths: tuple[int, ...]) -> None:
    """N16: six sessions that grow to 8,000 tokens; those at the shorter engine move once."""
    async with GatewayWorld(num_backends=2) as world:
        await two_lengths(world, lengths)
        moved = 0
        for number in range(6):
            messages: list[dict[str, Any]] = []
            homes = []
            for turn in range(16):
                messages.append({"role": "user", "content": text(f"s{number}t{turn}", 500)})
                answer = await world.chat(f"growing-{number}", messages=messages)
                assert answer.status_code == 200
                homes.append(answer.headers["x-homing-backend"])
                messages.append({"role": "assistant", "content": "ok"})
            assert homes[-1] == "b1"
            changes = sum(before != after for before, after in itertools.pairwise(homes))
            assert changes == (homes[0] == "b0")
            moved += changes
        assert moved > 0
        metrics = (await world.client.get("/metrics")).text
        assert f'reason="home_too_short"}} {moved}.0' in metrics


async def test_the_list_of_models_tells_their_length() -> None:
    """N15: the least of all backends; what an adapter is made of."""
    async with GatewayWorld(num_backends=2) as world:
        Limited(world.backends[0], 131_072, root="org/model", created=1_700_000_000)
        Limited(world.backends[1], 32_768, root="org/model", parent="base")
        await world.gateway.prober.list_anew()
        await world.wait_for(lambda: len(world.gateway.fleet.model_cards()) == 1)
        await world.wait_for(
            lambda: all(one.context_tokens for one in world.gateway.fleet.view.backends.values())
        )
        (card,) = (await world.client.get("/v1/models")).json()["data"]
        assert card["max_model_len"] == 32_768
        assert (card["root"], card["parent"], card["created"]) == ("org/model", "base", 1_700_000_000)
        assert (await world.client.get("/v1/models/fake-model")).json() == card


@pytest.mark.parametrize("tells_in", ["path", "metrics"])
async def test_a_sleeping_engine_gets_nothing(tells_in: str) -> None:
    """N18: `/health` is 200; after it is woken, its cache is empty and its sessions are not sent back."""
    async with GatewayWorld(num_backends=3) as world:
        homes = {}
        for number in range(12):
            homes[f"s{number}"] = (await world.chat(f"s{number}")).headers["x-homing-backend"]
        assert len(set(homes.values())) == 3
        asleep = world.backends[0]
        view = lambda: world.gateway.fleet.view.backends[BackendId("b0")]  # noqa: E731 - read anew each time
        epoch = view().epoch
        asleep.fall_asleep(tells_in)
        await world.gateway.prober.list_anew()
        await world.wait_for(lambda: view().state is BackendState.SLEEPING)
        served = len(asleep.requests)
        for number in range(24):
            answer = await world.chat(f"s{number}")
            assert answer.status_code == 200
            assert answer.headers["x-homing-backend"] != "b0"
        assert len(asleep.requests) == served
        asleep.wake_up(tells_in)
        await world.wait_for(lambda: view().state is BackendState.READY)
        assert view().epoch > epoch
        again = [await world.chat(session) for session in homes]
        assert all(answer.headers["x-homing-affinity"] == "hit" for answer in again)
        assert all(answer.headers["x-homing-backend"] != "b0" for answer in again)


async def test_a_new_model_is_found_at_once() -> None:
    """V05: an unknown name has the backends listed anew, but not at every request."""
    async with GatewayWorld(num_backends=2) as world:
        world.backends[1].model_card = {"id": "adapter"}
        answer = await world.chat(model="adapter")
        assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, "b1")
        num_lists = world.backends[1].num_lists
        for number in range(20):
            assert (await world.chat(model=f"no-{number}")).status_code == 404
        assert world.backends[1].num_lists <= num_lists + 1


def ranks(backend: ProbedBackend, name: str, count: int) -> list[dict[str, Any]]:
    spec = {"url": backend.base_url, "engine": "vllm"}
    return [{"id": f"{name}-r{rank}", "data_parallel_rank": rank, **spec} for rank in range(count)]


async def test_each_rank_of_an_engine_is_a_home() -> None:
    """V04: behind one address; a session's turns carry its rank, whatever the client says."""
    async with ProbedBackend() as engine:
        engine.more_metrics = "".join(
            f'vllm:cache_config_info{{engine="{rank}",block_size="16",num_gpu_blocks="{rank + 1}000"}} 1\n'
            for rank in range(4)
        )
        async with GatewayWorld(0, backends=ranks(engine, "e", 4)) as world:
            backends = world.gateway.fleet.view.backends
            await world.wait_for(
                lambda: all(one.kv_capacity_tokens for one in world.gateway.fleet.view.backends.values())
            )
            backends = world.gateway.fleet.view.backends
            assert [one.kv_capacity_tokens for one in backends.values()] == [
                16_000 * (rank + 1) for rank in range(4)
            ]
            homes: dict[str, set[str]] = {}
            for number in list(range(12)) * 3:
                answer = await world.chat(f"s{number}", headers={"x-data-parallel-rank": "9"})
                sent = engine.requests[-1]
                given = [value for name, value in sent.headers if name == "x-data-parallel-rank"]
                assert answer.headers["x-homing-backend"] == f"e-r{given[0]}"
                assert len(given) == 1
                homes.setdefault(f"s{number}", set()).add(given[0])
            assert all(len(found) == 1 for found in homes.values())
            assert len(set.union(*homes.values())) >= 3


async def test_an_engine_that_is_gone_takes_its_ranks_with_it() -> None:
    """No attempt goes to another rank of the same process."""
    async with ProbedBackend() as dead, ProbedBackend() as well:
        specs = [*ranks(dead, "dead", 4), {"id": "well", "url": well.base_url, "engine": "vllm"}]
        async with GatewayWorld(0, backends=specs, health={"probe_interval_s": 600}) as world:
            homes = {}
            for number in range(20):
                homes[f"s{number}"] = (await world.chat(f"s{number}")).headers["x-homing-backend"]
            lost = [session for session, home in homes.items() if home != "well"]
            assert lost
            await dead.stop()
            for session in lost[:4]:
                answer = await world.chat(session)
                assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, "well")
            await dead.start()
