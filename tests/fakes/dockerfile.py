"""The few facts of a Dockerfile that tests run outside a container: its last stage's instructions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "deploy" / "docker"


@dataclass(slots=True)
class Dockerfile:
    """What the final image is told to do. Instructions of earlier stages are forgotten, but for `bases`."""

    path: Path
    bases: list[str] = field(default_factory=list)
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def value(self, name: str) -> str:
        return next(value for key, value in reversed(self.instructions) if key == name)

    def command(self, name: str) -> list[str]:
        """The exec form of ENTRYPOINT, CMD or the CMD of HEALTHCHECK."""
        loaded = json.loads(self.value(name).rpartition("CMD ")[2])
        assert isinstance(loaded, list)
        return [str(word) for word in loaded]


def read_dockerfile(name: str) -> Dockerfile:
    found = Dockerfile(FOLDER / f"{name}.Dockerfile")
    text = re.sub(r"^\s*#.*\n", "", found.path.read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        key, _, value = line.strip().partition(" ")
        if key == "FROM":
            found.bases.append(value)
            found.instructions.clear()
        elif key:
            found.instructions.append((key, value))
    return found
