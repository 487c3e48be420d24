"""The `homing` command: one subcommand per file in `commands/`."""

from __future__ import annotations

import argparse
import functools
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
    "health": "check that a gateway or worker answers, for health checks",
    "status": "show the fleet: backends, states, sessions, hit rate, KV blocks",
    "top": "watch the fleet live",
    "backends": "list, add, remove, cordon or reweight backends",
    "drain": "stop new sessions on a backend and move the bound ones away",
    "undrain": "cancel a drain or a cordon",
    "sessions": "list, find, move or end sessions",
    "explain": "show where a session lives, what it cost and why it moved",
    "prefixes": "show the most requested prompt groups and the pins",
    "pin": "keep a shared prefix resident on engines that support pins",
    "unpin": "remove a pin",
    "what-if": "show what a change of the fleet would move, without making it",
    "completion": "print a completion script for a shell",
    "replay": "replay recorded decisions and compare them bit for bit",
    "simulate": "replay a trace against routing policies, without a fleet",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status (see `commands/exits.py`)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "worker":  # a separate program: the gateway imports no engine
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
    """Return a parser of all commands, with the options of the wanted command (None: of every command).

    Only the wanted command is imported: `homing status` does not need the server.
    """
    parser = CommandParser(
        prog="homing",
        description="Session-affinity gateway for LLM fleets: keeps each chat where its KV cache is.",
        epilog="See homing COMMAND --help. Exit status: 0 success, 1 failure or negative result, "
        "2 usage error, 3 no gateway answers.",
    )
    parser.add_argument(
        "--version", action="version", version=f"homing {importlib.metadata.version('homing')}"
    )
    parser.set_defaults(make_full_parser=functools.partial(make_parser, wanted=None))  # for `completion`
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
