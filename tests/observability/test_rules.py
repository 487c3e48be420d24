"""Prometheus rules and Grafana dashboards: valid, tested, and about metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
RULES = sorted(PROMETHEUS.glob("*.rules.yml"))
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
NAME = re.compile(r"\b(?:homing|process)(?:_\w+)?(?::\w+)*\b|\bup\b")
LABELS = re.compile(r"(?<=by )\(([^)]*)\)")
PARTS = ("_bucket", "_sum", "_count")


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (tests/install-system-packages.sh)")
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )


def documented() -> dict[str, set[str]]:
    """Metric name as it is queried → its labels, from METRICS.md."""
    row = re.compile(r"\| `(\w+)` \| (counter|gauge|histogram) \| ([\w, –]+) \|")
    found: dict[str, set[str]] = {}
    for name, kind, labels in row.findall((ROOT / "gateway" / "observability" / "METRICS.md").read_text()):
        known = set() if labels == "–" else set(labels.split(", "))
        if kind == "histogram":
            found |= {name + part: known | {"le"} for part in PARTS}
        else:
            found[name] = known
    return found


def recorded() -> set[str]:
    return {rule["record"] for path in RULES for rule in rules_of(path) if "record" in rule}


def rules_of(path: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            yield f"{path.name}: {panel['title']}", panel


def expressions() -> Iterator[tuple[str, str]]:
    """Where it stands, and the expression."""
    for path in RULES:
        for rule in rules_of(path):
            yield f"{path.name}: {rule.get('record') or rule['alert']}", rule["expr"]
    for place, panel in panels():
        for target in panel["targets"]:
            yield place, target["expr"]


def test_every_expression_is_about_metrics_that_exist() -> None:
    """Each name is in METRICS.md or recorded; each label that is grouped by belongs to the metric."""
    metrics, names = documented(), documented().keys() | recorded() | {"up"}
    num_checked = 0
    for place, expression in expressions():
        used = set(NAME.findall(re.sub(r'"[^"]*"', '""', expression)))
        assert used, place
        assert used <= names, (place, used - names)
        allowed = {"instance", "job"}.union(*(metrics.get(name, set()) for name in used))
        for labels in LABELS.findall(expression):
            wanted = {label.strip() for label in labels.split(",")}
            assert wanted <= allowed | {""}, (place, wanted - allowed)
        num_checked += 1
    assert num_checked > 60


def test_the_rules_are_valid() -> None:
    """promtool takes the rules and the configuration that names them."""
    for arguments in (("rules", *map(str, RULES)), ("config", str(PROMETHEUS / "prometheus.yml"))):
        answer = promtool("check", *arguments)
        assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_rules_do_what_they_say() -> None:
    """Recorded ratios are right; each alert fires on its fault and is silent on a healthy fleet."""
    answer = promtool("test", "rules", "tests/observability/rules.test.yml")
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_each_alert_has_been_seen_firing() -> None:
    """No alert is without a test, a severity, and a text that says what to do."""
    tested = (ROOT / "tests" / "observability" / "rules.test.yml").read_text()
    alerts = [rule for path in RULES for rule in rules_of(path) if "alert" in rule]
    assert alerts
    for alert in alerts:
        assert f'alertname="{alert["alert"]}"' in tested, alert["alert"]
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["description"]


def test_the_expressions_of_dashboards_are_valid_promql(tmp_path: Path) -> None:
    """Prometheus' own parser reads each of them, with Grafana's interval filled in."""
    rules = [
        {"record": f"panel:{number}", "expr": target["expr"].replace("$__rate_interval", "5m")}
        for number, target in enumerate(target for _, panel in panels() for target in panel["targets"])
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    answer = promtool("check", "rules", str(path))
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_dashboards_are_what_their_source_builds() -> None:
    """Grafana's own library builds the JSON, so it has the right shape; nobody edits it by hand."""
    spec = importlib.util.spec_from_file_location("build_dashboards", GRAFANA / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {path.name: path.read_text() for path in DASHBOARDS} == module.build()


def test_each_panel_can_be_read_by_a_stranger() -> None:
    """A title in plain words, one sentence on how to read it, a unit, and lines that have names."""
    titles = [place for place, _ in panels()]
    assert len(set(titles)) == len(titles)
    for place, panel in panels():
        assert "_" not in panel["title"], place
        assert panel["title"][0].isupper(), place
        assert len(panel["description"]) > 5, place
        assert panel["fieldConfig"]["defaults"]["unit"], place
        ids = [target["refId"] for target in panel["targets"]]
        assert ids == sorted(set(ids)) != [""], place
        if len(ids) > 1:
            assert all(target["legendFormat"] for target in panel["targets"]), place


def test_provisioning_is_read() -> None:
    """Grafana finds the dashboards where compose mounts them, and the Prometheus that compose starts."""
    provider = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "homing.yaml").read_text())
    source = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] == "/var/lib/grafana/dashboards"
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    services = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"]
    mounts = " ".join(services["grafana"]["volumes"])
    assert "/var/lib/grafana/dashboards" in mounts
    assert "prometheus" in services
    targets = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    hosts = {
        one.split(":")[0] for job in targets for part in job["static_configs"] for one in part["targets"]
    }
    assert hosts <= services.keys()
