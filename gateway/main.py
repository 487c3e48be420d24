"""The `homing` command: one subcommand per file in `commands/`."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys

from gateway.commands.exits import UsageError

COMMANDS = {
    "up": "start a gateway and workers on this machine, supervised",
    "gateway": "run one gateway in front of a fleet",
    "worker": "run one torch worker (options: homing worker --help)",
    "health": "ask a gateway or worker whether it is well, for health checks",
    "status": "show the fleet: backends, states, sessions, hit rate, KV blocks",
    "replay": "play recorded decisions again and compare them, bit for bit",
    "simulate": "replay a trace against routing policies, without a fleet",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status. 2 means: the user can mend it, one line says how."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "worker":  # a program of its own: the gateway imports no engine
        command = [sys.executable, "-m", "engine_adapter.server", *arguments[1:]]
        os.execv(command[0], command)  # noqa: S606 - our own program, no shell wanted
    parser = argparse.ArgumentParser(
        prog="homing", description="Session-affinity gateway for LLM fleets: every turn of a chat goes home."
    )
    parser.add_argument(
        "--version", action="version", version=f"homing {importlib.metadata.version('homing')}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = arguments[0] if arguments else ""
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if name == wanted:  # only the chosen command is imported: `homing status` needs no server
            importlib.import_module(_MODULES.get(name, f"gateway.commands.{name}")).add_arguments(subparser)
    options = parser.parse_args(arguments)
    module = importlib.import_module(_MODULES.get(options.command, f"gateway.commands.{options.command}"))
    try:
        return int(module.run(options))
    except UsageError as error:
        sys.stderr.write(f"homing {options.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


_MODULES = {"simulate": "gateway.replay.cli"}

if __name__ == "__main__":
    raise SystemExit(main())
