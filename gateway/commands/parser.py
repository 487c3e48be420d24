"""The parser of the command line: a mistake is told in two lines, with what was probably meant.

argparse answers a wrong option with the whole usage, and tells it in the name of the outermost command. Here
each command judges its own arguments. Knows no command.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_CHOICE = re.compile(r"(?P<what>.*): invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")
_OPTION = re.compile(r"--[a-z][a-z-]*")


class CommandParser(argparse.ArgumentParser):
    """Ends with status 2 for what it does not understand."""

    def parse_known_args(  # type: ignore[override]  # one signature for argparse's three
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Knows all of its arguments: the outer parser is left none to complain about."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            given = next(
                (argument for argument in unknown if argument.startswith("-")), unknown[0]
            ).partition("=")[0]
            known = _OPTION.findall(self.format_help()) if given.startswith("-") else ()
            self.error(f"there is no {given} here{meant(given, known)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        choice = _CHOICE.fullmatch(message)
        if choice is not None:
            known = [name.strip("' ") for name in choice["known"].split(",")]
            guess = meant(choice["given"], known) or f" (there are {', '.join(known)})"
            message = f"{choice['what']}: there is no {choice['given']!r}{guess}"
        sys.stderr.write(f"{self.prog}: {message}\nTry: {self.prog} --help\n")
        raise SystemExit(2)


def meant(given: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no name is near."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
