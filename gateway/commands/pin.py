"""`homing pin NAME FILE`: keep a shared prefix resident on engines that support pins."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gateway.commands.admin_client import AdminClient, add_admin_arguments, print_json
from gateway.commands.exits import UsageError
from gateway.commands.prefixes import pin_table
from gateway.commands.terminal import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser)
    parser.add_argument("name", help="name of the pin")
    parser.add_argument(
        "file",
        help="the prefix: a .json file with messages (a list, or an object with messages and tools), "
        "or a text file with the system prompt; - reads text from standard input",
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="pin only on this backend (repeatable; default: all)",
    )
    parser.add_argument("--tenant", help="tenant of the prefix, needed where caches are separated by tenant")
    parser.add_argument("--priority", type=int, default=0, help="lower is more important (default 0)")
    parser.add_argument("--ttl-s", type=float, metavar="SECONDS", help="remove the pin after this time")


def run(options: argparse.Namespace) -> int:
    order = _prefix(options.file) | {"name": options.name, "priority": options.priority}
    if options.backend:
        order["backends"] = options.backend
    if options.tenant is not None:
        order["tenant"] = options.tenant
    if options.ttl_s is not None:
        order["ttl_s"] = options.ttl_s
    answer = AdminClient(options.admin_url).post("/pins", order)
    if options.json:
        print_json(answer)
    else:
        console().print(pin_table(answer["backends"]))
    return 0


def _prefix(name: str) -> dict[str, Any]:
    """Read the prefix from a file or standard input. Raises UsageError."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {name}: {error}") from error
    if not name.endswith(".json"):
        return {"messages": [{"role": "system", "content": text}]}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{name} is not JSON: {error}") from error
    if isinstance(found, list):
        return {"messages": found}
    if isinstance(found, dict) and "messages" in found:
        return {key: found[key] for key in ("messages", "tools") if key in found}
    raise UsageError(f"{name} has no messages: it must be a list of messages, or an object with `messages`")
