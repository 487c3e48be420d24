"""What commands share as clients of the admin API: options, requests and error messages."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any
from urllib.parse import quote

import httpx

from gateway.commands.exits import CommandFailed, Unreachable, UsageError

TIMEOUT_S = 30.0
NOT_SHARED = "not in Redis yet: the order holds at this gateway, which tells the others as soon as it can"


def add_admin_arguments(parser: argparse.ArgumentParser, *, is_inner: bool = False) -> None:
    """Add `--admin` and `--json`. `is_inner`: for an action of a command that already has them."""
    url = os.environ.get("HOMING_ADMIN_URL", "http://127.0.0.1:8001")
    parser.add_argument(
        "--admin",
        "--admin-url",
        dest="admin_url",
        metavar="URL",
        default=argparse.SUPPRESS if is_inner else url,
        help="admin API of a gateway (default: $HOMING_ADMIN_URL or http://127.0.0.1:8001)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS if is_inner else False,
        help="print the API's JSON answer",
    )


class AdminClient:
    """A client of one gateway. The token comes from HOMING_ADMIN_TOKEN, never from the command line."""

    def __init__(self, url: str) -> None:
        token = os.environ.get("HOMING_ADMIN_TOKEN")
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str, **params: Any) -> Any:
        """Send a GET request. Raises CommandError, as all methods do."""
        return self._ask(
            "GET", path, params={key: value for key, value in params.items() if value is not None}
        )

    def post(self, path: str, body: object = None) -> Any:
        return self._ask("POST", path, body=body)

    def patch(self, path: str, body: object) -> Any:
        return self._ask("PATCH", path, body=body)

    def delete(self, path: str) -> Any:
        return self._ask("DELETE", path)

    def _ask(
        self, method: str, path: str, *, params: dict[str, Any] | None = None, body: object = None
    ) -> Any:
        url = f"{self._url}/admin/v1{path}"
        try:
            answer = httpx.request(
                method, url, params=params, json=body, headers=self._headers, timeout=TIMEOUT_S
            )
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise UsageError(f"{self._url!r} is not an http:// or https:// URL: {error}") from error
        except httpx.HTTPError as error:
            raise Unreachable(
                f"no gateway answers at {self._url} ({error}); start it, or set --admin to the right URL"
            ) from error
        if answer.status_code == 202:
            print(NOT_SHARED, file=sys.stderr)
        if answer.is_success:
            return _decoded(answer, url)
        raise _refusal(answer)


def name_in_path(name: str) -> str:
    """Quote user input as one path segment."""
    return quote(name, safe="")


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _decoded(answer: httpx.Response, url: str) -> Any:
    if not answer.content:
        return None
    try:
        return answer.json()
    except ValueError as error:
        raise Unreachable(f"{url} did not answer with JSON: set --admin to the admin API's URL") from error


def _refusal(answer: httpx.Response) -> CommandFailed | UsageError:
    try:
        problem = answer.json()
        detail = str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        detail = f"the server answered {answer.status_code}; is --admin the admin API (port 8001 by default)?"
    if answer.status_code == 401:
        return UsageError("the gateway needs its admin token: set HOMING_ADMIN_TOKEN")
    if answer.status_code in (400, 403, 415):
        return UsageError(detail)
    return CommandFailed(detail)
