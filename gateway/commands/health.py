"""`homing health`: one GET, exit status 0 or 1: what a container's health check runs.

It imports nothing but the standard library: it runs every few seconds beside a process that has better use
for the CPU.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import urllib.error
import urllib.request

from gateway.commands.exits import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="?",
        default="http://127.0.0.1:8000/livez",
        help="what to ask (default: %(default)s); /readyz also wants a ready backend, a worker has /health",
    )
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS")


def run(options: argparse.Namespace) -> int:
    """0 for any status below 400. Raises UsageError for a url that cannot be asked."""
    if not options.url.startswith(("http://", "https://")):
        raise UsageError(f"{options.url!r} is not an http:// or https:// url")
    try:
        with urllib.request.urlopen(options.url, timeout=options.timeout) as answer:  # noqa: S310 - checked
            answer.read(65_536)
    except urllib.error.HTTPError as error:
        return _unhealthy(options.url, f"it answered {error.code}")
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)  # of an URLError
        return _unhealthy(options.url, getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)
    return 0


def _unhealthy(url: str, reason: str) -> int:
    sys.stderr.write(f"unhealthy: {url}: {reason}\n")
    return 1
