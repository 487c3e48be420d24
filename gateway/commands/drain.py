"""`homing drain BACKEND`: stop new sessions; bound ones move at their next turn. `--wait` until it is
empty."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.commands.admin_client import AdminClient, add_admin_arguments, name_in_path, print_json
from gateway.commands.exits import CommandFailed
from gateway.commands.terminal import console, plain

POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser)
    parser.add_argument("backend", help="name of the backend")
    parser.add_argument(
        "--wait", action="store_true", help="wait until the backend is empty or the deadline has passed"
    )
    parser.add_argument(
        "--deadline-s",
        type=float,
        metavar="SECONDS",
        help="time for sessions to leave (default: fleet.drain_deadline_s)",
    )
    parser.add_argument(
        "--until-restart", action="store_true", help="end the drain when the engine has restarted"
    )


def run(options: argparse.Namespace) -> int:
    """Exit status 1 if the drain is cancelled meanwhile."""
    client, path = AdminClient(options.admin_url), f"/backends/{name_in_path(options.backend)}"
    order: dict[str, Any] = {"until_restart": options.until_restart}
    if options.deadline_s is not None:
        order["deadline_s"] = options.deadline_s
    backend = client.post(f"{path}/drain", order)
    if options.wait:
        backend = _wait(client, path, backend, is_quiet=options.json)
    if options.json:
        print_json(backend)
    else:
        console().print(plain(_words(options.backend, backend["drain"])))
    return 0


def _wait(client: AdminClient, path: str, backend: dict[str, Any], *, is_quiet: bool) -> dict[str, Any]:
    """Poll until the backend is drained. Raises CommandFailed if the drain is cancelled."""
    columns = (TextColumn("draining"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(), disable=is_quiet, transient=True) as progress:
        num_first = max(1, _num_left(backend["drain"]))
        task = progress.add_task("", total=num_first)
        while not backend["drain"]["is_drained"]:
            drain = backend["drain"]
            words = f"{drain['sessions']} sessions, {drain['in_flight']} requests left"
            progress.update(task, completed=num_first - _num_left(drain), description=words)
            time.sleep(POLL_S)
            backend = client.get(path)
            if backend["drain"] is None:
                raise CommandFailed("the drain was cancelled: see homing backends, then drain again")
    return backend


def _num_left(drain: dict[str, Any]) -> int:
    return int(drain["sessions"] + drain["in_flight"])


def _words(name: str, drain: dict[str, Any]) -> str:
    if drain["is_drained"]:
        left = (
            f"; {drain['sessions']} sessions did not leave before the deadline" if drain["sessions"] else ""
        )
        return f"{name} is drained{left}"
    return (
        f"{name} is draining: {drain['sessions']} sessions and {drain['in_flight']} requests left, "
        f"{drain['deadline_left_s']:.0f} s until the deadline"
    )
