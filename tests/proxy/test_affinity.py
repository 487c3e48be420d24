"""Sessions come home: the key that wins, what happens without one, and what every path shares."""

from __future__ import annotations

import argparse
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from fakes.backend import respond
from fakes.gateway_world import GatewayWorld

from gateway.commands import replay as replay_command
from gateway.replay.recording import replay


async def test_every_turn_of_a_session_lands_on_one_backend() -> None:
    """Six turns with a session id: `new`, then `hit`, all on the same backend."""
    async with GatewayWorld(num_backends=4) as world:
        answers = [await world.chat("alice") for _ in range(6)]
        assert [answer.headers["x-homing-affinity"] for answer in answers] == ["new"] + ["hit"] * 5
        assert len({answer.headers["x-homing-backend"] for answer in answers}) == 1
        assert {answer.headers["x-homing-key-source"] for answer in answers} == {"header"}
        assert sorted(world.served().values()) == [6]
        world.assert_idle()


async def test_per_request_ids_never_decide() -> None:
    """B01: fresh request ids beside a session id change nothing."""
    async with GatewayWorld(num_backends=4) as world:
        for session in range(20):
            backends = set()
            for _ in range(6):
                fresh = {
                    "x-request-id": uuid.uuid4().hex,
                    "x-client-request-id": uuid.uuid4().hex,
                    "traceparent": f"00-{uuid.uuid4().hex}-{uuid.uuid4().hex[:16]}-01",
                }
                answer = await world.chat(f"conversation-{session}", headers=fresh)
                backends.add(answer.headers["x-homing-backend"])
            assert len(backends) == 1


async def test_per_request_ids_alone_leave_the_prompt_to_decide() -> None:
    """B01: with only fresh ids, the turns of one conversation follow their prompt."""
    async with GatewayWorld(num_backends=4) as world:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a pirate. " * 20}]
        messages.append({"role": "user", "content": "Tell me a long story about the seven seas, please."})
        sources, backends = set(), set()
        for _ in range(6):
            answer = await world.chat(messages=messages, headers={"x-request-id": uuid.uuid4().hex})
            sources.add(answer.headers["x-homing-key-source"])
            backends.add(answer.headers["x-homing-backend"])
            messages += [{"role": "assistant", "content": "Arr."}, {"role": "user", "content": "More!"}]
        assert sources == {"fingerprint"}
        assert len(backends) == 1


@pytest.mark.parametrize("headers", [{}, {"x-session-id": ""}, {"x-session-id": "{{CHAT_ID}}"}])
async def test_without_any_key_requests_spread(headers: dict[str, str]) -> None:
    """B02: an absent, empty or unfilled key is no key: requests spread over the fleet, and are counted."""
    async with GatewayWorld(num_backends=8) as world:
        for _ in range(400):
            answer = await world.client.post(
                "/v1/completions", json={"model": "fake-model", "prompt": ""}, headers=headers
            )
            assert answer.headers["x-homing-affinity"] == "unpinned"
            assert answer.headers["x-homing-key-source"] == "none"
        counts = world.served()
        assert len(counts) == 8
        assert max(counts.values()) <= 1.5 * min(counts.values())
        metrics = (await world.client.get("/metrics")).text
        assert 'homing_affinity_total{affinity="unpinned",key_source="none"} 400.0' in metrics


async def test_system_prompts_place_when_there_is_no_session() -> None:
    """B02: 50 prompt groups without sessions have 50 stable placements, over all backends."""
    async with GatewayWorld(num_backends=8) as world:
        homes: dict[int, set[str]] = {}
        for number in list(range(50)) * 4:
            messages = [{"role": "system", "content": f"You are assistant number {number}. " * 30}]
            answer = await world.chat(messages=[*messages, {"role": "user", "content": "hi"}])
            assert answer.headers["x-homing-key-source"] == "prompt_group"
            homes.setdefault(number, set()).add(answer.headers["x-homing-backend"])
        assert all(len(backends) == 1 for backends in homes.values())
        assert len(set.union(*homes.values())) == 8


@pytest.mark.parametrize(
    "path_and_body",
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
async def test_every_api_is_sticky(path_and_body: tuple[str, dict[str, Any]]) -> None:
    """B05: the same session id leads every path to the same backend, and reaches it unchanged."""
    path, body = path_and_body
    async with GatewayWorld(num_backends=4) as world:
        home = (await world.chat("bob")).headers["x-homing-backend"]
        answer = await world.client.post(
            path, json={"model": "fake-model", **body}, headers={"x-session-id": "bob"}
        )
        assert answer.status_code == 200
        assert answer.headers["x-homing-backend"] == home
        received = world.backends[int(home[1:])].requests[-1]
        assert (received.target, received.header("x-session-id")) == (path, "bob")


@pytest.mark.parametrize("session_id", [123, True, 1.5, None, [], {"a": 1}])
async def test_odd_session_ids_in_the_body_are_no_keys(session_id: object) -> None:
    """B08: a body id that is not a string is ignored, never an error and never the key `None`."""
    async with GatewayWorld(num_backends=2) as world:
        answer = await world.chat(session_id=session_id)
        assert answer.status_code == 200
        assert answer.headers["x-homing-key-source"] in ("none", "prompt_group", "fingerprint")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"fake-model","session_id":"\\ud83d","messages":[{"role":"user","content":"hi"}]}',
        b'{"model":"fake-model","session_id":"a\\u0000b","messages":[{"role":"user","content":"hi"}]}',
        b'{"model":"fake-model","session_id":"%b","messages":[{"role":"user","content":"hi"}]}'
        % (b"x" * 10**6),
        b'{"model":"fake-model","messages":[{"role":"user","content":"\\ud83d"}]}',
    ],
)
async def test_odd_strings_travel_unchanged(body: bytes) -> None:
    """B08: lone surrogates, NUL and a megabyte of id reach the backend byte for byte."""
    async with GatewayWorld(num_backends=2) as world:
        answer = await world.client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200
        assert [one.body for backend in world.backends for one in backend.requests] == [body]


async def test_a_long_header_id_is_no_key() -> None:
    """B08: beyond the stated limit an id counts as absent."""
    async with GatewayWorld(num_backends=2) as world:
        answer = await world.chat("x" * 8000)
        assert answer.status_code == 200
        assert answer.headers["x-homing-key-source"] != "header"


async def test_with_no_backend_the_answer_is_503_with_retry_after() -> None:
    """B08: an empty fleet refuses clearly."""
    async with GatewayWorld(num_backends=0) as world:
        answer = await world.chat("alice")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "no_backend_available"


SYSTEM = "You are a helpful assistant for the harbour office. " * 10


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": SYSTEM}],
        [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}],
        [{"role": "developer", "content": SYSTEM}],
    ],
)
async def test_equal_system_prompts_are_one_group_in_every_shape(messages: list[dict[str, Any]]) -> None:
    """B36: string, one text part and developer role name one prompt group; an image changes nothing."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2_000_000}}
    contents: list[Any] = ["hi", [{"type": "text", "text": "hi"}, image], None, [{"type": "novel", "x": 1}]]
    async with GatewayWorld(num_backends=2) as world:
        groups = set()
        for content in contents:
            question = {
                "body": {"model": "fake-model", "messages": [*messages, {"role": "user", "content": content}]}
            }
            decision = await world.admin.post("/admin/v1/route", json=question)
            groups.add(decision.json()["prompt_group"])
            sent = await world.chat(messages=[*messages, {"role": "user", "content": content}])
            assert sent.status_code == 200
        plain = {"body": {"model": "fake-model", "messages": [{"role": "system", "content": SYSTEM}]}}
        groups.add((await world.admin.post("/admin/v1/route", json=plain)).json()["prompt_group"])
        assert len(groups) == 1
        assert groups != {None}


async def test_recorded_decisions_replay_bit_for_bit(tmp_path: Path) -> None:
    """What a live gateway decided, with streams, a drain and a death, comes out the same played again."""
    recording = tmp_path / "decisions.jsonl"
    async with GatewayWorld(num_backends=3, record_path=recording) as world:
        for number in range(30):
            await world.chat(f"s{number % 7}", stream=number % 2 == 0)
            if number == 10:
                await world.admin.post("/admin/v1/backends/b0/drain")
            if number == 20:
                await world.backends[1].stop()
        assert (await world.chat(model="no-such-model")).status_code == 404
    lines = recording.read_bytes().splitlines()
    assert sum(b'"event":"decide"' in line for line in lines) > 30
    assert list(replay(lines)) == []
    options = argparse.Namespace(recording=recording)
    assert replay_command.run(options) == 0


async def test_follow_ups_of_a_response_reach_the_backend_that_stored_it() -> None:
    """B44: no session id at all; previous_response_id, GET and cancel all go where the answer was made."""
    async with GatewayWorld(num_backends=4) as world:
        for number in range(6):
            body = {"id": f"resp_{number}", "object": "response", "output": [], "usage": {"input_tokens": 5}}
            for backend in world.backends:
                backend.default = respond(json.dumps(body).encode())
            first = await world.client.post("/v1/responses", json={"model": "fake-model", "input": "hi"})
            home = first.headers["x-homing-backend"]
            previous = {"model": "fake-model", "input": "more", "previous_response_id": f"resp_{number}"}
            follow_up = await world.client.post("/v1/responses", json=previous)
            assert follow_up.headers["x-homing-backend"] == home
            assert follow_up.headers["x-homing-key-source"] == "response_id"
            shown = await world.client.get(f"/v1/responses/resp_{number}")
            assert shown.headers["x-homing-backend"] == home
            cancelled = await world.client.post(f"/v1/responses/resp_{number}/cancel")
            assert cancelled.headers["x-homing-backend"] == home
