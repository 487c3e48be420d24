"""`homing what-if`: show how many sessions and tokens a change of the fleet would move, without making it."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from gateway.commands.admin_client import AdminClient, add_admin_arguments, print_json
from gateway.commands.exits import UsageError
from gateway.commands.terminal import add_row, console, count, plain, share, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser)
    parser.add_argument(
        "--add", action="append", default=[], metavar="NAME[=WEIGHT]", help="add a backend (repeatable)"
    )
    parser.add_argument(
        "--remove", action="append", default=[], metavar="NAME", help="remove a backend (repeatable)"
    )
    parser.add_argument(
        "--weight", action="append", default=[], metavar="NAME=WEIGHT", help="change a weight (repeatable)"
    )


def run(options: argparse.Namespace) -> int:
    if not (options.add or options.remove or options.weight):
        raise UsageError("give at least one of --add, --remove and --weight")
    question = {
        "add": [dict(zip(("id", "weight"), _pair(text, 1.0), strict=True)) for text in options.add],
        "remove": options.remove,
        "reweight": dict(_pair(text, None) for text in options.weight),
    }
    answer = AdminClient(options.admin_url).post("/what-if", question)
    if options.json:
        print_json(answer)
    else:
        console().print(_table(answer["backends"]), "", plain(_words(answer)))
    return 0


def _pair(text: str, default: float | None) -> tuple[str, float]:
    name, has_weight, weight = text.partition("=")
    if not has_weight and default is not None:
        return name, default
    try:
        return name, float(weight)
    except ValueError:
        raise UsageError(f"{text!r} is not NAME=WEIGHT with a numeric weight") from None


def _table(backends: list[dict[str, Any]]) -> Table:
    found = table("backend", ">weight", ">→", ">new sessions", ">→", ">bound sessions", ">→", ">tokens", ">→")
    for backend in backends:
        add_row(
            found,
            [
                backend["id"],
                backend["weight_before"],
                backend["weight_after"],
                share(backend["ring_share_before"]),
                share(backend["ring_share_after"]),
                count(backend["sessions_before"]),
                count(backend["sessions_after"]),
                count(backend["tokens_before"]),
                count(backend["tokens_after"]),
            ],
        )
    return found


def _words(answer: dict[str, Any]) -> str:
    sampled = " (estimated from a sample)" if answer["is_sampled"] else ""
    return (
        f"{share(answer['new_sessions_moved_share'])} of new sessions would start on another backend; "
        f"{answer['sessions_moved']} of {answer['sessions']} bound sessions would move and recompute "
        f"{count(answer['tokens_moved'])} of {count(answer['tokens'])} tokens{sampled}"
    )
