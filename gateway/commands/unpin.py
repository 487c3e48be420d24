"""`homing unpin NAME`: remove a pin from every backend that has it."""

from __future__ import annotations

import argparse

from gateway.commands.admin_client import AdminClient, add_admin_arguments, name_in_path, print_json
from gateway.commands.prefixes import pin_table
from gateway.commands.terminal import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser)
    parser.add_argument("name", help="name or id of the pin")


def run(options: argparse.Namespace) -> int:
    answer = AdminClient(options.admin_url).delete(f"/pins/{name_in_path(options.name)}")
    if options.json:
        print_json(answer)
    else:
        console().print(pin_table(answer["backends"]))
    return 0
