"""`homing health`: one GET request, exit status 0 or 1, for a container's health check.

Imports only the standard library: it runs every few seconds and should use little CPU.
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
        help="URL to check (default: %(default)s); use /readyz to require that it takes requests, "
        "/readyz?min_backends=1 to also require a ready backend, /health for a worker",
    )
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS")


def run(options: argparse.Namespace) -> int:
    """Return 0 for any HTTP status below 400, else 1. Raises UsageError for an invalid URL."""
    if not options.url.startswith(("http://", "https://")):
        raise UsageError(f"{options.url!r} is not an http:// or https:// URL")
    try:
        with urllib.request.urlopen(options.url, timeout=options.timeout) as answer:  # noqa: S310 - checked
            answer.read(65_536)
    except urllib.error.HTTPError as error:
        return _unhealthy(options.url, f"answered {error.code}")
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)  # of an URLError
        return _unhealthy(options.url, getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)
    return 0


def _unhealthy(url: str, reason: str) -> int:
    sys.stderr.write(f"unhealthy: {url}: {reason}\n")
    return 1
