"""The commands over the admin API: what they print, what they change, how they end."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fakes import backend as fake
from fakes.gateway_world import GatewayWorld
from rich.console import Console

from gateway.commands.admin_client import NOT_SHARED
from gateway.commands.exits import CommandFailed, Unreachable, UsageError
from gateway.commands.terminal import count, plain, seconds
from gateway.commands.top import render
from gateway.main import COMMANDS, main, make_parser
from gateway.values import BackendId

Homing = Callable[..., Coroutine[Any, Any, tuple[int, str, str]]]
SYSTEM = {"role": "system", "content": "You are a helpful assistant of the harbour office. " * 20}


@pytest.fixture
def homing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Homing:
    """Run one command against a world: exit status, standard output, standard error."""
    monkeypatch.delenv("HOMING_ADMIN_TOKEN", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")

    async def run(world: GatewayWorld | None, *arguments: str) -> tuple[int, str, str]:
        more = [] if world is None else ["--admin", str(world.admin.base_url)]
        status = await asyncio.to_thread(main, [*arguments, *more])
        return status, *capsys.readouterr()

    return run


async def talk(world: GatewayWorld, *sessions: str, num_turns: int = 2) -> dict[str, str]:
    """Some turns of each; where each lives."""
    homes = {}
    for session in sessions:
        for number in range(num_turns):
            messages = [SYSTEM, *({"role": "user", "content": f"q{one}"} for one in range(number + 1))]
            answer = await world.chat(session, messages=messages)
            homes[session] = answer.headers["x-homing-backend"]
    return homes


async def test_status_is_a_table_and_fails_when_nothing_serves(homing: Homing) -> None:
    """A line per backend; exit status 1 once none can take a request."""
    async with GatewayWorld(num_backends=2) as world:
        await talk(world, "alice")
        status, out, _ = await homing(world, "status")
        assert status == 0
        assert "b0" in out
        assert "1 hit, 1 new" in out
        for number in range(2):
            await world.admin.post(f"/admin/v1/backends/b{number}/drain")
        assert (await homing(world, "status"))[0] == 1


async def test_every_listing_speaks_json(homing: Homing) -> None:
    """The answers of the API as they are, parsable, whatever the terminal."""
    async with GatewayWorld(num_backends=2) as world:
        await talk(world, "alice")
        for command in (
            ["status"],
            ["backends"],
            ["sessions"],
            ["explain", "alice"],
            ["prefixes"],
            ["what-if", "--remove", "b0"],
            ["top"],
            ["undrain", "b0"],
        ):
            status, out, err = await homing(world, *command, "--json")
            assert (status, err) == (0, ""), command
            assert json.loads(out), command


async def test_backends_can_be_changed(homing: Homing) -> None:
    """Weight, cordon, removal, and back by adding."""
    async with GatewayWorld(num_backends=2) as world:
        view = lambda: world.gateway.fleet.view.backends  # noqa: E731 - read anew each time
        assert (await homing(world, "backends", "weight", "b0", "2.5"))[0] == 0
        assert view()[BackendId("b0")].weight == 2.5
        assert "cordoned" in (await homing(world, "backends", "cordon", "b0"))[1]
        assert (await homing(world, "backends", "remove", "b0"))[:2] == (0, "")
        assert "b0" not in view()
        url = world.backends[0].base_url
        status, out, _ = await homing(
            world, "backends", "add", url, "--id", "b7", "--engine", "vllm", "--json"
        )
        assert (status, json.loads(out)["id"]) == (0, "b7")


async def test_an_order_that_is_not_shared_is_told_so(homing: Homing) -> None:
    """C01: with Redis away the commands succeed, and standard error says that other gateways do not know."""
    sessions = {"store": "redis", "redis": {"url": "redis://127.0.0.1:1/0"}}
    async with GatewayWorld(num_backends=2, sessions=sessions) as world:
        for order in (("drain", "b0"), ("undrain", "b0"), ("backends", "remove", "b0")):
            status, _, err = await homing(world, *order)
            assert status == 0
            assert NOT_SHARED in err
        status, out, err = await homing(world, "backends")
        assert (status, err) == (0, "")
        assert "b0" not in out


async def test_sessions_are_listed_found_moved_and_ended(homing: Homing) -> None:
    """The limit holds; an unknown id is exit status 1."""
    async with GatewayWorld(num_backends=2) as world:
        homes = await talk(world, *(f"session-{number}" for number in range(6)), num_turns=1)
        status, out, _ = await homing(world, "sessions", "--limit", "4", "--json")
        assert (status, len(json.loads(out)["sessions"])) == (0, 4)
        _, out, _ = await homing(world, "sessions", "--id", "session-0", "--json")
        (row,) = json.loads(out)["sessions"]
        assert row["backend"] == homes["session-0"]
        other = "b1" if row["backend"] == "b0" else "b0"
        assert (await homing(world, "sessions", "move", row["key"], other))[0] == 0
        assert (await talk(world, "session-0", num_turns=1))["session-0"] == other
        assert (await homing(world, "sessions", "end", row["key"]))[0] == 0
        assert (await homing(world, "sessions", "--id", "session-0"))[0] == 1
        assert (await homing(world, "sessions", "move", row["key"], other))[0] == 1


async def test_explain_tells_the_story(homing: Homing) -> None:
    """By the client's id and by the beginning of the key: home, hit rate, moves with reasons, turns."""
    async with GatewayWorld(num_backends=2) as world:
        home = (await talk(world, "alice"))["alice"]
        await world.admin.delete(f"/admin/v1/backends/{home}")
        await talk(world, "alice", num_turns=1)
        status, out, _ = await homing(world, "explain", "alice")
        assert status == 0
        assert "home_removed" in out
        assert "next turn" in out
        key = out.split()[1]
        assert "home_removed" in (await homing(world, "explain", key[:12]))[1]
        status, _, err = await homing(world, "explain", "nobody")
        assert status == CommandFailed.status
        assert "no session 'nobody' is bound" in err


async def test_explain_tells_what_became_of_an_id_that_was_ignored(homing: Homing) -> None:
    """One id for all users: it names the longest conversation, and leads to the others."""
    async with GatewayWorld(num_backends=2, key_watch={"max_conversations_per_key": 2}) as world:
        for number in range(5):
            messages: list[dict[str, Any]] = [SYSTEM]
            for turn in range(5 - number):
                messages.append(
                    {"role": "user", "content": f"Question {turn} of the user number {number}, please."}
                )
                assert (await world.chat("everybody", messages=messages)).status_code == 200
                messages.append({"role": "assistant", "content": f"Answer {turn} to {number}"})
        status, out, _ = await homing(world, "explain", "everybody")
        assert status == 0
        assert "Many conversations came under this id" in out
        found = json.loads((await homing(world, "explain", "everybody", "--json"))[1])
        (ignored,) = found["ignored_ids"]
        assert ignored["requests"] == {"shared": 5}
        assert len(ignored["sessions"]) == 3
        for key in ignored["sessions"]:
            assert f"homing explain {key}" in out
            _, told, _ = await homing(world, "explain", key)
            assert "fingerprint" in told
        session = await world.admin.get(f"/admin/v1/sessions/{ignored['sessions'][0]}")
        assert session.json()["ignored_id"] is None
        assert found["session"]["ignored_id"]["requests"] == {"shared": 5}


async def test_drain_waits_until_the_backend_is_empty(homing: Homing) -> None:
    """With `--wait` it returns when the last request is done; without, at once."""
    async with GatewayWorld(num_backends=2) as world:
        gate = asyncio.Event()

        async def slow(turn: fake.Turn) -> None:
            await gate.wait()
            await fake.respond(b'{"choices":[]}')(turn)

        for backend in world.backends:
            backend.script(slow)
        running = asyncio.create_task(world.chat())
        b0, b1, router = BackendId("b0"), BackendId("b1"), world.gateway.router
        await world.wait_for(lambda: router.in_flight(b0) + router.in_flight(b1) > 0)
        busy = b0 if router.in_flight(b0) else b1
        status, out, _ = await homing(world, "drain", busy)
        assert (status, f"{busy} is draining" in out) == (0, True)
        waiting = asyncio.create_task(homing(world, "drain", busy, "--wait"))
        await asyncio.wait((waiting,), timeout=0.7)
        assert not waiting.done()
        gate.set()
        await running
        status, out, _ = await waiting
        assert (status, f"{busy} is drained" in out) == (0, True)
        assert f"{busy} is ready" in (await homing(world, "undrain", busy))[1]


async def test_a_drain_taken_back_ends_the_wait(homing: Homing) -> None:
    """Exit status 1, and a line that says so."""
    async with GatewayWorld(num_backends=2) as world:
        home = (await talk(world, "alice"))["alice"]
        waiting = asyncio.create_task(homing(world, "drain", home, "--wait"))
        await world.wait_for(lambda: world.state(int(home[1:])) == "draining")
        await world.admin.post(f"/admin/v1/backends/{home}/undrain")
        status, _, err = await waiting
        assert status == 1
        assert "cancelled" in err


async def test_what_if_says_what_would_move(homing: Homing) -> None:
    """In a sentence; without a change there is nothing to ask."""
    async with GatewayWorld(num_backends=2) as world:
        homes = await talk(world, "alice", "bob", "carol", num_turns=1)
        num_moved = list(homes.values()).count("b0")
        _, out, _ = await homing(world, "what-if", "--remove", "b0", "--add", "b5=2", "--weight", "b1=3")
        assert f"{num_moved} of 3 bound sessions would move" in " ".join(out.split())
        assert (await homing(world, "what-if"))[0] == UsageError.status
        assert (await homing(world, "what-if", "--weight", "b1=heavy"))[0] == UsageError.status
        assert (await homing(world, "what-if", "--remove", "b9"))[0] == UsageError.status


async def test_pins_go_only_where_there_are_any(homing: Homing, tmp_path: Path) -> None:
    """The engine without pins is named; what cannot be read is told before anything is asked."""
    async with GatewayWorld(num_backends=1) as world:
        prompt = tmp_path / "prompt.txt"
        prompt.write_text("You are a helpful assistant.")
        status, _, err = await homing(world, "pin", "support", str(prompt), "--backend", "b0")
        assert status == 1
        assert "runs vllm, which does not support pins" in err
        assert (await homing(world, "unpin", "support"))[0] == 1
        odd = tmp_path / "odd.json"
        odd.write_text("{}")
        for name in (str(odd), str(tmp_path / "missing.txt")):
            assert (await homing(world, "pin", "support", name))[0] == UsageError.status


async def test_top_shows_the_fleet_and_its_rates(homing: Homing) -> None:
    """Two looks, then it ends; rates are those between the looks."""
    async with GatewayWorld(num_backends=2) as world:
        await talk(world, "alice", num_turns=3)
        status, out, _ = await homing(world, "top", "--looks", "2", "--interval", "0.1")
        assert status == 0
        assert "requests/s" in out
        assert "hottest prompt groups" in out
        before = (await world.admin.get("/admin/v1/summary")).json()
        after = {**before, "at_wall_s": before["at_wall_s"] + 2, "requests": {"chat": 103.0}}
        screen = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        with screen.capture() as captured:
            screen.print(render(after, before))
        assert "50.0 requests/s" in captured.get()
        screen.file.close()


async def test_a_gateway_that_is_not_there(homing: Homing) -> None:
    """Exit status 3 and one line that says what to do."""
    status, out, err = await homing(None, "status", "--admin", "http://127.0.0.1:9")
    assert (status, out) == (Unreachable.status, "")
    assert err.count("\n") == 1
    assert "start it" in err
    assert (await homing(None, "status", "--admin", "nowhere"))[0] == UsageError.status


async def test_the_data_port_is_not_the_admin_api(homing: Homing) -> None:
    """A common mistake: the line names the port to use."""
    async with GatewayWorld(num_backends=1) as world:
        status, _, err = await homing(None, "status", "--admin", world.base_url)
        assert status == 1
        assert "8001" in err


async def test_the_token_comes_from_the_environment(homing: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, or with the wrong role, the line says so: exit status 2."""
    environ = {"HOMING_ADMIN_TOKEN": "operate-me", "HOMING_ADMIN_READ_TOKEN": "read-me"}
    async with GatewayWorld(num_backends=1, environ=environ) as world:
        status, _, err = await homing(world, "status")
        assert (status, "HOMING_ADMIN_TOKEN" in err) == (2, True)
        monkeypatch.setenv("HOMING_ADMIN_TOKEN", "read-me")
        assert (await homing(world, "status"))[0] == 0
        status, _, err = await homing(world, "drain", "b0")
        assert (status, "read-only" in err) == (2, True)
        monkeypatch.setenv("HOMING_ADMIN_TOKEN", "operate-me")
        assert (await homing(world, "drain", "b0"))[0] == 0


def test_names_cannot_rewrite_the_screen() -> None:
    """Control characters are shown as dots, and markup is only text."""
    assert plain("a\x1b[2Jb\rc").plain == "a·[2Jb·c"
    screen = Console(width=40)
    with screen.capture() as captured:
        screen.print(plain("[red]x[/red]"))
    assert captured.get().strip() == "[red]x[/red]"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0"), (1234, "1,234"), (12_345, "12.3k"), (4_560_000, "4.6M")]
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    """As people read them."""
    assert count(value) == text
    assert seconds(0.25) == "250 ms"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script names all commands, and bash can read it."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_every_command_has_help() -> None:
    """Each of them parses its own options; shared ones are the same everywhere."""
    parser = make_parser(wanted=None)
    for command in ("status", "backends", "drain", "undrain", "sessions", "prefixes", "top"):
        needed = ["b0"] if command in ("drain", "undrain") else []
        options = parser.parse_args([command, "--admin", "http://a", "--json", *needed])
        assert (options.admin_url, options.json) == ("http://a", True)
    inner = parser.parse_args(["backends", "--admin", "http://a", "remove", "b0", "--json"])
    assert (inner.admin_url, inner.json) == ("http://a", True)
