"""`homing status`: the fleet as a table, read from the admin API."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from gateway.commands.exits import UsageError

_STATE_COLOURS = {"ready": "green", "down": "red", "joining": "yellow", "draining": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--admin-url",
        default=os.environ.get("HOMING_ADMIN_URL", "http://127.0.0.1:8001"),
        help="admin API of a gateway (default $HOMING_ADMIN_URL or http://127.0.0.1:8001)",
    )
    parser.add_argument("--json", action="store_true", help="print the answer of the API as it is")


def run(options: argparse.Namespace) -> int:
    """Print the table. Exit status 1 when no backend is ready."""
    status = fetch(options.admin_url, "/admin/v1/status")
    if options.json:
        json.dump(status, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        Console().print(_table(status), _footer(status))
    return 0 if any(one["state"] in ("ready", "cordoned") for one in status["backends"]) else 1


def fetch(admin_url: str, path: str) -> Any:
    """GET from the admin API. Raises UsageError that says what to do."""
    token = os.environ.get("HOMING_ADMIN_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(admin_url + path, headers=headers, timeout=5.0)
    except httpx.HTTPError as error:
        raise UsageError(
            f"no gateway answers at {admin_url} ({error}). Is it running? --admin-url names another."
        ) from error
    if answer.status_code == 401:
        raise UsageError("the gateway wants its admin token: set HOMING_ADMIN_TOKEN")
    if answer.status_code != 200:
        raise UsageError(f"the gateway answered {answer.status_code}: {answer.text[:200]}")
    return answer.json()


def _table(status: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("backend", "state", "in-flight", "sessions", "hit rate"):
        table.add_column(name, justify="left" if name in ("backend", "state") else "right")
    for name in ("blocks used", "cached", "pinned", "free"):
        table.add_column(name, justify="right")
    for one in status["backends"]:
        colour = _STATE_COLOURS.get(one["state"], "white")
        hit_rate = "–" if one["hit_rate"] is None else f"{one['hit_rate']:.0%}"
        blocks = one["kv_blocks"] or {}
        table.add_row(
            one["id"],
            f"[{colour}]{one['state']}[/{colour}]",
            str(one["in_flight"]),
            str(one["sessions"]),
            hit_rate,
            *(str(blocks.get(state, "–")) for state in ("used", "cached", "pinned", "free")),
        )
    return table


def _footer(status: dict[str, Any]) -> str:
    affinity = ", ".join(f"{int(count)} {name}" for name, count in sorted(status["affinity"].items()))
    store = status["session_store"]
    degraded = " (degraded)" if store["is_degraded"] else ""
    return (
        f"\nrequests: {affinity or 'none yet'}; {store['kind']} store{degraded}: {store['sessions']} sessions"
    )
