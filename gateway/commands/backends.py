"""`homing backends`: list backends with routing's estimates; add, remove, cordon, reweight."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from gateway.commands.admin_client import AdminClient, add_admin_arguments, name_in_path, print_json
from gateway.commands.terminal import add_row, console, count, seconds, share, state, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions (default: list)")
    add = actions.add_parser("add", help="add a backend, or update an existing one")
    add.add_argument("url", help="URL of the engine: http://host:port")
    add.add_argument("--id", help="name of the backend (default: made from host and port)")
    add.add_argument("--engine", default="openai", help="torch, vllm, sglang, llamacpp, trtllm or openai")
    add.add_argument("--weight", type=float, default=1.0, help="share of new sessions (default 1)")
    remove = actions.add_parser("remove", help="remove a backend immediately; its sessions move")
    cordon = actions.add_parser("cordon", help="stop new sessions; bound ones stay")
    weight = actions.add_parser("weight", help="change a backend's share of new sessions")
    for action in (remove, cordon, weight):
        action.add_argument("backend")
    weight.add_argument("weight", type=float)
    for action in (add, remove, cordon, weight):
        add_admin_arguments(action, is_inner=True)


def run(options: argparse.Namespace) -> int:
    client = AdminClient(options.admin_url)
    if options.action is None:
        answer = client.get("/backends")
        rows = answer["backends"]
    else:
        answer = _act(client, options)
        rows = [] if options.action == "remove" else [answer]
    if options.json:
        print_json(answer)
    elif rows or options.action is None:
        console().print(_table(rows))
    return 0


def _act(client: AdminClient, options: argparse.Namespace) -> Any:
    if options.action == "add":
        spec = {"url": options.url, "engine": options.engine, "weight": options.weight}
        return client.post("/backends", spec | ({"id": options.id} if options.id else {}))
    path = f"/backends/{name_in_path(options.backend)}"
    if options.action == "remove":
        return client.delete(path)
    if options.action == "cordon":
        return client.post(f"{path}/cordon")
    return client.patch(path, {"weight": options.weight})


def _table(backends: list[dict[str, Any]]) -> Table:
    found = table(
        "backend",
        "state",
        "engine",
        "url",
        ">weight",
        ">in-flight",
        ">sessions",
        ">hit rate",
        ">prompt tokens",
        ">wait",
        "models",
    )
    for backend in backends:
        belief = backend["routing"] or {}
        add_row(
            found,
            [
                backend["id"],
                state(backend["state"]),
                backend["engine"],
                backend["url"],
                f"{backend['weight']:g}",
                backend["in_flight"],
                backend["sessions"],
                share(backend["hit_rate"]),
                count(backend["prompt_tokens"]),
                seconds(belief.get("wait_s")),
                "any" if backend["models"] is None else ", ".join(backend["models"]),
            ],
        )
    return found
