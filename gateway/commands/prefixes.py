"""`homing prefixes`: the most requested prompt groups, the backends that hold them, and the pins."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from gateway.commands.admin_client import AdminClient, add_admin_arguments, print_json
from gateway.commands.terminal import add_row, ago, console, count, share, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser)
    parser.add_argument("--limit", type=int, default=20, help="number of groups (default 20)")


def run(options: argparse.Namespace) -> int:
    client = AdminClient(options.admin_url)
    groups = client.get("/prompt-groups", limit=options.limit)["groups"]
    pins = client.get("/pins")["backends"]
    if options.json:
        print_json({"groups": groups, "pins": pins})
    else:
        console().print(_groups(groups), "", pin_table(pins))
    return 0


def _groups(groups: list[dict[str, Any]]) -> Table:
    found = table(
        "prompt group", "model", ">recent", ">requests", ">hit rate", ">tokens", "last seen", "held by"
    )
    for group in groups:
        add_row(
            found,
            [
                group["key"][:12],
                group["model"],
                f"{group['recent_requests']:.0f}",
                count(group["requests"]),
                share(group["hit_rate"]),
                count(group["prefix_tokens"]),
                ago(group["last_seen_wall_s"]),
                ", ".join(holder["backend"] for holder in group["holders"]),
            ],
        )
    return found


def pin_table(backends: list[dict[str, Any]]) -> Table:
    """Return a table of every pin of every backend, with one row for a backend without pins."""
    found = table("backend", "pin", "state", ">pinned tokens", ">of", ">priority", title="pins")
    for backend in backends:
        for pin in backend["pins"]:
            cells = [backend["backend"], pin["name"] or pin["id"], pin["state"]]
            tokens = [count(pin["pinned_tokens"]), count(pin["num_tokens"])]
            add_row(found, [*cells, *tokens, pin["priority"]])
        for pin in backend["missing"]:
            state = "gave up" if pin["is_given_up"] else "pending"
            told = f"{state}: {pin['problem']}" if pin["problem"] else state
            add_row(found, [backend["backend"], pin["name"], told, None, None, None])
        if not backend["pins"] and not backend["missing"]:
            add_row(found, [backend["backend"], None, backend["problem"] or "no pins", None, None, None])
    return found
