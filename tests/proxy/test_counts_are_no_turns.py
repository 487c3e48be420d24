"""What a client asks beside its conversation, under the same id, changes nothing for the conversation."""

from __future__ import annotations

from typing import Any

from fakes.gateway_world import GatewayWorld

SESSION = {"x-claude-code-session-id": "6f1c9a52-3b8d-4a0e-9c57-0d2f4e8b7a31"}


def _history(num_turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"question {turn} " * 20})
        messages.append({"role": "assistant", "content": f"answer {turn} " * 20})
    return [*messages, {"role": "user", "content": "and now?"}]


async def test_counting_tokens_never_costs_a_session_its_key() -> None:
    """Claude Code's `/context`: one count per entry, each with one tool, between the turns of a session."""
    async with GatewayWorld(3) as world:
        body: dict[str, Any] = {"model": "fake-model", "max_tokens": 5, "system": "be brief"}
        homes, affinities = set(), []
        for turn in range(6):
            if turn == 3:
                for number in range(24):
                    tool = {"name": f"tool_{number}", "description": "x" * 50, "input_schema": {}}
                    count = body | {"messages": _history(0), "tools": [tool]}
                    path = "/v1/messages/count_tokens"
                    assert (await world.client.post(path, json=count, headers=SESSION)).status_code == 200
            asked = body | {"messages": _history(turn)}
            answer = await world.client.post("/v1/messages", json=asked, headers=SESSION)
            affinities.append(answer.headers["x-homing-affinity"])
            homes.add(answer.headers["x-homing-backend"])
        assert affinities == ["new", *["hit"] * 5]
        assert len(homes) == 1
        sessions = (await world.admin.get("/admin/v1/sessions")).json()["sessions"]
        assert [session["turns"] for session in sessions] == [6]
