"""The values of the Helm chart: which ones it refuses, and that file and schema name the same keys."""

from __future__ import annotations

import re
from typing import Any

import helm_python
import pytest
import yaml
from fakes.helm_chart import CHART, render


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"worker": {"enabled": False}}, "no engine to send requests to"),
        ({"redis": {"bundled": {"enabled": False}}}, "several gateways need a shared session store"),
        ({"redis": {"external": {"url": "redis://r:6379"}}}, "set redis.bundled.enabled to false"),
        ({"ingress": {"enabled": True}}, r"set ingress\.hosts"),
        ({"httpRoute": {"enabled": True}}, r"set httpRoute\.parentRefs"),
        (
            {
                "gateway": {"replicas": 1},
                "redis": {"bundled": {"enabled": False}, "external": {"existingSecret": "s"}},
            },
            "without a server",
        ),
    ],
)
def test_senseless_values_fail_with_a_message(values: dict[str, Any], message: str) -> None:
    """B79: not at the pod's start, and the message says what to set."""
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)


@pytest.mark.parametrize(
    "values",
    [
        {"replicaCount": 3},
        {"gateway": {"replica": 3}},
        {"gateway": {"replicas": "three"}},
        {"gateway": {"replicas": 0}},
        {"gateway": {"resources": {"limits": {"memory": None}}}},
        {"worker": {"gpu": {"enable": True}}},
        {"redis": {"external": {"url": "redis://user:password@host"}}},
        {"image": {"digest": "abc"}},
        {"backends": [{"adress": "http://a"}]},
        {"backends": [{"url": "http://a", "engine": "vlm"}]},
        {"service": {"port": 70000}},
    ],
)
def test_the_schema_refuses_typos_and_wrong_types(values: dict[str, Any]) -> None:
    """Misspelt keys, too: they would be ignored in silence."""
    with pytest.raises(helm_python.HelmError):
        render(values)


def test_every_value_is_in_the_schema_and_every_schema_key_has_a_default() -> None:
    """`values.yaml` and `values.schema.json` name the same keys."""

    def keys(value: dict[str, Any], prefix: str = "") -> set[str]:
        found = set()
        for name, inner in value.items():
            found.add(prefix + name)
            if isinstance(inner, dict):
                found |= keys(inner, f"{prefix}{name}.")
        return found

    def schema_keys(schema: dict[str, Any], prefix: str = "") -> set[str]:
        found = set()
        for name, inner in schema.get("properties", {}).items():
            found.add(prefix + name)
            found |= schema_keys(inner, f"{prefix}{name}.")
        return found

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    free = re.compile(r"\.(annotations|requests|limits)\.")
    assert {key for key in keys(values) if not free.search(key)} == {
        key for key in schema_keys(schema) if key != "global"
    }
