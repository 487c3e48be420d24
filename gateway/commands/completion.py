"""`homing completion SHELL`: a completion script for bash, zsh or tcsh, made from the options themselves."""

from __future__ import annotations

import argparse
import sys

from gateway.commands.exits import UsageError

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)
    parser.epilog = 'Try: eval "$(homing completion bash)"'


def run(options: argparse.Namespace) -> int:
    try:
        import shtab  # an extra: completion is asked for once, by some
    except ImportError as error:
        raise UsageError("completion needs the package shtab: pip install 'homing[completion]'") from error
    from gateway.main import make_parser  # it imports all commands, this one among them

    sys.stdout.write(shtab.complete(make_parser(wanted=None), shell=options.shell) + "\n")
    return 0
