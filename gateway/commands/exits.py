"""Exit statuses of commands. A command that does not succeed prints one line on standard error.

0  success
1  failure or negative result: not healthy, refused, not found, not in time
2  usage error: a bad option, file, token or port; the line says what to fix
3  no gateway answers
"""

from __future__ import annotations

from typing import ClassVar


class CommandError(Exception):
    """An error whose one-line message says what happened, to what, and what to do."""

    status: ClassVar[int] = 1


class CommandFailed(CommandError):
    """The request was valid, but it failed or the result is negative."""


class UsageError(CommandError):
    """The user gave a bad option, file, token or port and can fix it."""

    status = 2


class Unreachable(CommandError):
    """No gateway answers."""

    status = 3
