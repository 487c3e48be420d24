"""`homing sessions`: list sessions of all backends or of one; find by id or key; move, end."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from gateway.commands.admin_client import AdminClient, add_admin_arguments, name_in_path, print_json
from gateway.commands.terminal import add_row, console, count, plain, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser)
    parser.add_argument("--id", metavar="ID", help="find by the client's session id")
    parser.add_argument("--model", help="with --id: model that the session uses (default: try all)")
    parser.add_argument("--tenant", default="default", help="with --id: tenant of the session")
    parser.add_argument("--key", help="find by key or its beginning, as in the access log")
    parser.add_argument("--backend", help="list only sessions of this backend")
    parser.add_argument("--limit", type=int, default=50, help="number of sessions to list (default 50)")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions (default: list)")
    move = actions.add_parser("move", help="move a session to another backend")
    end = actions.add_parser("end", help="end a session: forget its home")
    for action in (move, end):
        action.add_argument("session", metavar="KEY")
        add_admin_arguments(action, is_inner=True)
    move.add_argument("to", metavar="BACKEND")


def run(options: argparse.Namespace) -> int:
    """Exit status 1 if a session was searched for and not found."""
    client = AdminClient(options.admin_url)
    if options.action is not None:
        return _act(client, options)
    rows, is_all = _collect(client, options)
    if options.json:
        print_json({"sessions": rows})
    elif rows:
        console().print(_table(rows))
        if not is_all:
            console().print("… and more: raise --limit or set --backend")
    else:
        console().print("no such session" if options.id or options.key else "no sessions")
    return 0 if rows or not (options.id or options.key) else 1


def _act(client: AdminClient, options: argparse.Namespace) -> int:
    path = f"/sessions/{name_in_path(options.session)}"
    if options.action == "move":
        answer = client.post(f"{path}/move", {"backend": options.to})
        words = f"session {options.session} now lives on {options.to}"
    else:
        answer = client.delete(path)
        words = f"session {options.session} ended"
    if options.json:
        print_json(answer)
    else:
        console().print(plain(words))
    return 0


def _collect(client: AdminClient, options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Fetch pages up to the limit. Return the sessions, and whether these are all."""
    rows: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = client.get(
            "/sessions",
            session_id=options.id,
            model=options.model,
            tenant=options.tenant,
            key=options.key,
            backend=options.backend,
            cursor=cursor,
            limit=min(1000, max(1, options.limit - len(rows))),
        )
        rows += page["sessions"]
        cursor = page["next_cursor"]
        if cursor is None or len(rows) >= options.limit:
            return rows, cursor is None


def _table(rows: list[dict[str, Any]]) -> Table:
    found = table("session", "backend", ">turns", ">context tokens", ">epoch")
    for session in rows:
        cells = [
            session["key"],
            session["backend"],
            session["turns"],
            count(session["context_tokens"]),
            session["epoch"],
        ]
        add_row(found, cells)
    return found
