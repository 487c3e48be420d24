"""How a command ends when the user can mend the cause: one line on standard error, exit status 2."""

from __future__ import annotations


class UsageError(Exception):
    """What happened, to what, and what to do, in one line."""
