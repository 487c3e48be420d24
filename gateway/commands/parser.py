"""The command-line parser: reports a mistake in two lines and suggests the option that was probably meant.

argparse answers a wrong option with the whole usage text, in the name of the outermost command. Here each
command checks its own arguments. Knows no commands.
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
    """Exits with status 2 for invalid arguments."""

    def parse_known_args(  # type: ignore[override]  # one signature for argparse's three
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here, so that the outer parser does not report them."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            given = next(
                (argument for argument in unknown if argument.startswith("-")), unknown[0]
            ).partition("=")[0]
            known = _OPTION.findall(self.format_help()) if given.startswith("-") else ()
            kind = "option" if given.startswith("-") else "argument"
            self.error(f"unknown {kind} {given}{meant(given, known)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        choice = _CHOICE.fullmatch(message)
        if choice is not None:
            known = [name.strip("' ") for name in choice["known"].split(",")]
            guess = meant(choice["given"], known) or f" (choose from {', '.join(known)})"
            message = f"{choice['what']}: invalid choice {choice['given']!r}{guess}"
        sys.stderr.write(f"{self.prog}: {message}\nTry: {self.prog} --help\n")
        raise SystemExit(2)


def meant(given: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or an empty string if no known name is similar."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
