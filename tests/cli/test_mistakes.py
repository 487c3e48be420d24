"""What the command line says to mistakes: what happened, to what, and what to do, in two lines at most."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from fakes.gateway_process import GatewayProcess
from fakes.gateway_world import GatewayWorld

from gateway.commands.exits import CommandFailed, Unreachable, UsageError
from gateway.commands.gateway import run
from gateway.config.config import ConfigError, parse_config
from gateway.main import COMMANDS, main, make_parser
from gateway.process.gateway import Gateway
from gateway.process.listeners import CannotListen
from gateway.values import BackendId


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["gatway"], "invalid choice 'gatway'; did you mean gateway?"),
        (["frobnicate"], "invalid choice 'frobnicate' (choose from up, gateway, worker,"),
        (["gateway", "--prot", "1"], "homing gateway: unknown option --prot; did you mean --port?"),
        (["gateway", "--prot=1"], "did you mean --port?"),
        (["gateway", "extra"], "homing gateway: unknown argument extra"),
        (["gateway", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (["backends", "remov", "b0"], "invalid choice 'remov'; did you mean remove?"),
        (["pin", "name"], "the following arguments are required: file"),
    ],
)
def test_a_wrong_argument_is_told_in_two_lines(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the nearest right one, in the name of the command that was meant; status 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    first, second, *more = capsys.readouterr().err.splitlines()
    assert expected in first
    assert (second.startswith("Try: homing"), second.endswith("--help"), more) == (True, True, [])


def test_help_lists_commands_and_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    """What scripts need to know is where people look."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert all(f" {name} " in text for name in COMMANDS)
    assert "0 success, 1 failure or negative result, 2 usage error, 3 no gateway answers" in text
    assert (CommandFailed.status, UsageError.status, Unreachable.status) == (1, 2, 3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"lisen": {}}, "top level: unknown key `lisen`; did you mean `listen`?"),
        ({"listen": {"zzz": 1}}, "listen: unknown key `zzz`; known: host, port, unix_path, tls"),
        ({"listen": {"tls": {"cert": "x"}}}, "listen.tls: unknown key `cert`; did you mean `cert_file`?"),
        ({"backends": [{"url": "http://a", "wieght": 1}]}, "backends[0]: unknown key `wieght`; did you mean"),
        (
            {"sessions": {"store": "rediss"}},
            "sessions.store: Invalid enum value 'rediss'; did you mean `redis`",
        ),
        ({"sessions": {"store": "x"}}, "known: memory, redis"),
        (
            {"fleet": {"discovery": {"dns": [{"hots": "x"}]}}},
            "fleet.discovery.dns[0]: unknown key `hots`; did",
        ),
        ({"qqqqq": 1}, "top level: unknown key `qqqqq`"),
    ],
)
def test_a_misspelt_option_is_told_with_the_right_one(config: dict[str, Any], expected: str) -> None:
    """Wherever it is; where none is near and there are few, all are listed."""
    with pytest.raises(ConfigError) as refused:
        parse_config(config)
    assert expected in str(refused.value)


@pytest.mark.parametrize("option", ["listen", "admin"])
async def test_a_taken_port_is_told_with_its_option(option: str) -> None:
    """Which of the two listeners, which address, why, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = parse_config({"listen": {"port": 0}, "admin": {"port": 0}, option: {"port": port}})
        with pytest.raises(CannotListen) as refused:
            await Gateway(config).start()
    message = str(refused.value)
    assert message.startswith(f"cannot listen on 127.0.0.1:{port}: ")
    assert message.endswith(f"Stop the process that listens there, or choose another port in `{option}`.")


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        (
            {"host": "192.0.2.1", "port": 0},
            "cannot listen on 192.0.2.1:0: .*This machine has no such address.* in `listen`",
        ),
        (
            {"unix_path": "/nowhere/x.sock"},
            "cannot listen on /nowhere/x.sock: .*folder .* in `listen.unix_path`",
        ),
    ],
)
async def test_a_place_that_cannot_be_is_told(listen: dict[str, Any], expected: str) -> None:
    """An address of another machine, a folder that is not there."""
    with pytest.raises(CannotListen, match=expected):
        await Gateway(parse_config({"listen": listen, "admin": {"port": 0}})).start()


async def test_a_command_whose_port_is_taken_ends_with_status_two(tmp_path: Path) -> None:
    """The whole process, beside one that has the port."""
    gateway = GatewayProcess(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway.write(listen={"port": taken.getsockname()[1]})
        gateway.start()
        assert await gateway.wait_ended() == 2
    await gateway.client.aclose()
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith("homing gateway: cannot listen on 127.0.0.1:")
    (event,) = gateway.events("no_backends")
    assert "--backend URL" in event["advice"]


async def test_a_backend_that_does_not_answer_at_start_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """It changes no state, so nothing else would tell; the gateway starts and goes on asking."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    backends = [{"id": "gone", "url": f"http://127.0.0.1:{port}"}]
    async with GatewayWorld(1) as world:
        assert (await world.admin.post("/admin/v1/backends", json=backends[0])).status_code == 201

        def told() -> list[dict[str, Any]]:
            found = [one for one in caplog.records if one.getMessage() == "backend_unreachable"]
            return [vars(one)["fields"] for one in found]

        await world.wait_for(lambda: told() != [])
        gone = BackendId("gone")
        asked = world.gateway.prober._num_unanswered[gone]
        await world.wait_for(lambda: world.gateway.prober._num_unanswered[gone] > asked + 2)
        (fields,) = told()
        assert (fields["backend"], fields["url"]) == ("gone", f"http://127.0.0.1:{port}")
        assert "connect failed" in fields["reason"]


def test_a_file_that_cannot_be_written_is_told_before_anything_listens() -> None:
    """A usage error, with the option's name."""
    options = make_parser(wanted="gateway").parse_args(["gateway", "--record", "/nowhere/file"])
    with pytest.raises(UsageError, match="--record: cannot write /nowhere/file"):
        run(options)
