"""`homing top`: the fleet, live in the terminal. Ctrl-C ends it."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.commands.admin_client import AdminClient, add_admin_arguments, print_json
from gateway.commands.status import fleet_table
from gateway.commands.terminal import add_row, ago, console, count, plain, seconds, share, table

NUM_ROWS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="refresh interval")
    parser.add_argument("--looks", type=int, metavar="N", help="stop after N refreshes (default: never)")


def run(options: argparse.Namespace) -> int:
    """With --json: print one summary and end."""
    client = AdminClient(options.admin_url)
    before = client.get("/summary")
    if options.json:
        print_json(before)
        return 0
    num_looks = 1
    with Live(render(before, None), console=console(), auto_refresh=False) as live:
        live.refresh()
        try:
            while options.looks is None or num_looks < options.looks:
                time.sleep(max(0.1, options.interval))
                summary = client.get("/summary")
                live.update(render(summary, before), refresh=True)
                before, num_looks = summary, num_looks + 1
        except KeyboardInterrupt:
            return 0
    return 0


def render(summary: dict[str, Any], before: dict[str, Any] | None) -> RenderableType:
    """Render one screen; rates are measured since `before`."""
    return Group(
        _headline(summary, before),
        Text(),
        fleet_table(summary["status"]["backends"]),
        Text(),
        _curve(summary["by_turn"]),
        Text(),
        _groups(summary["groups"]),
        Text(),
        _moves(summary["recent_moves"]),
    )


def _headline(summary: dict[str, Any], before: dict[str, Any] | None) -> Text:
    num_requests = sum(summary["requests"].values())
    parts = [f"homing {summary['version']}"]
    if before is None:
        parts.append(f"{count(num_requests)} requests")
        prompt, cached = summary["prompt_tokens"], summary["cached_tokens"]
    else:
        passed_s = max(0.001, summary["at_wall_s"] - before["at_wall_s"])
        parts.append(f"{(num_requests - sum(before['requests'].values())) / passed_s:.1f} requests/s")
        prompt = summary["prompt_tokens"] - before["prompt_tokens"]
        cached = summary["cached_tokens"] - before["cached_tokens"]
    parts.append(f"{summary['in_flight']} in flight")
    parts.append(f"hit rate {share(cached / prompt if prompt > 0 else None)}")
    parts.append(f"{count(summary['cached_tokens'])} tokens saved")
    store = summary["status"]["session_store"]
    parts.append(f"{count(store['sessions'])} sessions in {store['kind']}")
    if store["is_degraded"]:
        parts.append("STORE DEGRADED")
    return plain("  ".join(parts))


def _curve(points: list[dict[str, Any]]) -> Table:
    found = table(">turn", ">turns", ">hit rate", ">first token, hit", ">first token, cold", title="by turn")
    for point in points[:NUM_ROWS]:
        times = [seconds(point["ttft_hit_s"]), seconds(point["ttft_cold_s"])]
        add_row(found, [point["turn"], count(point["num_turns"]), share(point["hit_rate"]), *times])
    return found


def _groups(groups: list[dict[str, Any]]) -> Table:
    found = table("prompt group", ">recent", ">hit rate", ">tokens", "held by", title="hottest prompt groups")
    for group in groups[:NUM_ROWS]:
        holders = ", ".join(holder["backend"] for holder in group["holders"])
        cells = [group["key"][:12], f"{group['recent_requests']:.0f}", share(group["hit_rate"])]
        add_row(found, [*cells, count(group["prefix_tokens"]), holders])
    return found


def _moves(moves: list[dict[str, Any]]) -> Table:
    found = table("when", "session", "from", "to", "why", title="last moves")
    for move in reversed(moves[-NUM_ROWS:]):
        add_row(
            found,
            [ago(move["at_wall_s"]), move["session"][:12], move["before"], move["after"], move["reason"]],
        )
    return found
