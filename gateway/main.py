"""The `homing` command: one subcommand per file in `commands/`."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from typing import Any

from gateway.commands.exits import CommandError
from gateway.commands.parser import CommandParser

COMMANDS = {
    "up": "start a gateway and workers on this machine, supervised",
    "gateway": "run one gateway in front of a fleet",
    "worker": "run one torch worker (options: homing worker --help)",
    "health": "ask a gateway or worker whether it is well, for health checks",
    "status": "show the fleet: backends, states, sessions, hit rate, KV blocks",
    "top": "watch the fleet, live",
    "backends": "list backends; add, remove, cordon, reweight",
    "drain": "take no new sessions on a backend and let the bound ones leave",
    "undrain": "take back a drain or a cordon",
    "sessions": "list sessions, find one, move or end it",
    "explain": "say where a session lives, what it cost and why it moved",
    "prefixes": "show the hottest prompt groups and what is pinned",
    "pin": "keep a shared prefix resident on engines that have pins",
    "unpin": "let a pinned prefix go",
    "what-if": "say what a change of the fleet would move, without making it",
    "completion": "print a completion script for a shell",
    "replay": "play recorded decisions again and compare them, bit for bit",
    "simulate": "replay a trace against routing policies, without a fleet",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status, as `commands/exits.py` lists them."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "worker":  # a program of its own: the gateway imports no engine
        command = [sys.executable, "-m", "engine_adapter.server", *arguments[1:]]
        os.execv(command[0], command)  # noqa: S606 - our own program, no shell wanted
    parser = make_parser(wanted=arguments[0] if arguments else "")
    options = parser.parse_args(arguments)
    try:
        return int(_module(options.command).run(options))
    except CommandError as error:
        sys.stderr.write(f"homing {options.command}: {error}\n")
        return error.status
    except KeyboardInterrupt:
        return 130


def make_parser(*, wanted: str | None) -> argparse.ArgumentParser:
    """All commands, and the options of the wanted one; of every one for None.

    Only the wanted command is imported: `homing status` needs no server.
    """
    parser = CommandParser(
        prog="homing",
        description="Session-affinity gateway for LLM fleets: every turn of a chat goes home.",
        epilog="homing COMMAND --help tells more. Exit status: 0 well, 1 the answer is no, 2 asked wrongly, "
        "3 nobody answers.",
    )
    parser.add_argument(
        "--version", action="version", version=f"homing {importlib.metadata.version('homing')}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if name == wanted or (wanted is None and name != "worker"):
            _module(name).add_arguments(subparser)
    return parser


def _module(command: str) -> Any:
    name = _MODULES.get(command, f"gateway.commands.{command.replace('-', '_')}")
    return importlib.import_module(name)


_MODULES = {"simulate": "gateway.replay.cli"}

if __name__ == "__main__":
    raise SystemExit(main())
