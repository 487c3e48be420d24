"""`homing undrain BACKEND`: cancel a drain or a cordon."""

from __future__ import annotations

import argparse

from gateway.commands.admin_client import AdminClient, add_admin_arguments, name_in_path, print_json
from gateway.commands.terminal import console, plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser)
    parser.add_argument("backend", help="name of the backend")


def run(options: argparse.Namespace) -> int:
    backend = AdminClient(options.admin_url).post(f"/backends/{name_in_path(options.backend)}/undrain")
    if options.json:
        print_json(backend)
    else:
        console().print(plain(f"{backend['id']} is {backend['state']}"))
    return 0
