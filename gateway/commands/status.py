"""`homing status`: the fleet as a table. Exit status 1 if no backend can serve."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from gateway.commands.admin_client import AdminClient, add_admin_arguments, print_json
from gateway.commands.terminal import add_row, console, share, state, table

_SERVING = ("ready", "degraded", "cordoned")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser)


def run(options: argparse.Namespace) -> int:
    status = AdminClient(options.admin_url).get("/status")
    if options.json:
        print_json(status)
    else:
        console().print(fleet_table(status["backends"]), _footer(status))
    return 0 if any(backend["state"] in _SERVING for backend in status["backends"]) else 1


def fleet_table(backends: list[dict[str, Any]]) -> Table:
    """Return one row per backend, with block columns if any engine reports blocks."""
    has_blocks = any(backend["kv_blocks"] for backend in backends)
    blocks = ("used", "cached", "pinned", "free") if has_blocks else ()
    found = table(
        "backend",
        "state",
        ">weight",
        ">in-flight",
        ">sessions",
        ">hit rate",
        *(f">blocks {name}" if name == "used" else f">{name}" for name in blocks),
    )
    for backend in backends:
        kv_blocks = backend["kv_blocks"] or {}
        add_row(
            found,
            [
                backend["id"],
                state(backend["state"]),
                f"{backend['weight']:g}",
                backend["in_flight"],
                backend["sessions"],
                share(backend["hit_rate"]),
                *(kv_blocks.get(name) for name in blocks),
            ],
        )
    return found


def _footer(status: dict[str, Any]) -> str:
    affinity = ", ".join(f"{int(count)} {name}" for name, count in sorted(status["affinity"].items()))
    store = status["session_store"]
    degraded = " (degraded)" if store["is_degraded"] else ""
    return (
        f"\nrequests: {affinity or 'none yet'}; {store['kind']} store{degraded}: {store['sessions']} sessions"
    )
