"""`homing replay`: replay recorded decisions and report differences."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from gateway.commands.exits import UsageError
from gateway.replay.recording import replay

MAX_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, help="file written by homing gateway --record")


def run(options: argparse.Namespace) -> int:
    """Exit status 0 if all decisions are the same, 1 if one differs."""
    try:
        lines = options.recording.read_bytes().splitlines()
        mismatches = list(replay(lines))
    except OSError as error:
        raise UsageError(f"cannot read {options.recording}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"{options.recording} is not a complete recording: {error}") from error
    num_decisions = sum(b'"event":"decide"' in line for line in lines)
    sys.stdout.write(f"{num_decisions} decisions, {len(mismatches)} different\n")
    for mismatch in mismatches[:MAX_SHOWN]:
        sys.stdout.write(f"line {mismatch.line}: {mismatch.recorded} became {mismatch.replayed}\n")
    return 1 if mismatches else 0
