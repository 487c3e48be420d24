"""Our chart, rendered by real Helm into manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "homing"


class Manifests(list[dict[str, Any]]):
    """Everything one rendering made."""

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self if one["kind"] == kind]

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """The one of this kind and name. Fails when there is none, or more than one."""
        (found,) = [one for one in self.of_kind(kind) if one["metadata"]["name"] == name]
        return found

    def pod_specs(self) -> dict[str, dict[str, Any]]:
        """Name to pod spec of whatever runs containers."""
        specs = {}
        for one in self:
            if one["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
                specs[one["metadata"]["name"]] = one["spec"]["template"]["spec"]
            elif one["kind"] == "Pod":
                specs[one["metadata"]["name"]] = one["spec"]
        return specs


def render(
    values: dict[str, Any] | None = None, *, name: str = "homing", namespace: str = "llm"
) -> Manifests:
    """As `helm template`. Raises helm_python.HelmError."""
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values or {}, name=name, namespace=namespace)
    found = Manifests()
    for path, text in files.items():
        if path.endswith(".yaml"):
            found.extend(one for one in yaml.safe_load_all(text) if one is not None)
    return found


def notes(values: dict[str, Any] | None = None) -> str:
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values or {}, name="homing", namespace="llm")
    return next(text for path, text in files.items() if path.endswith("NOTES.txt"))


def lint(values: dict[str, Any] | None = None) -> list[str]:
    """Warnings and errors of `helm lint --strict`."""
    report = helm_python.lint(CHART, values or {}, strict=True)
    return [*report["errors"], *(one["error"] for one in report["messages"] if one["severity"] > 1)]
