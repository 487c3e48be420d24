"""`homing completion SHELL`: a completion script for bash, zsh or tcsh, generated from the options."""

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
        import shtab  # an optional dependency
    except ImportError as error:
        raise UsageError("completion needs the package shtab: pip install 'homing[completion]'") from error
    sys.stdout.write(shtab.complete(options.make_full_parser(), shell=options.shell) + "\n")
    return 0
