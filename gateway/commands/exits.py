"""How a command ends when it does not succeed: one line on standard error, and a status for scripts.

0  done, and well
1  done, but the answer is no: not healthy, refused, not found, not in time
2  asked wrongly: an option, a file, a token; the line says what to mend
3  nobody there: no gateway answers
"""

from __future__ import annotations

from typing import ClassVar


class CommandError(Exception):
    """What happened, to what, and what to do, in one line."""

    status: ClassVar[int] = 1


class CommandFailed(CommandError):
    """The question was understood and the answer is no."""


class UsageError(CommandError):
    """The user can mend it."""

    status = 2


class Unreachable(CommandError):
    """No gateway answers."""

    status = 3
