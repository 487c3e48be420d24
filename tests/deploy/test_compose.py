"""The Compose files, read by real Compose: they are valid, consistent with the gateway, and stop gently."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from gateway.config.config import load_config

FOLDER = Path(__file__).parents[2] / "deploy" / "compose"
COMPOSE = Path(sys.executable).with_name("docker-compose")
SECRETS = {"HOMING_ADMIN_TOKEN": "admin", "HOMING_KEY_SECRET": "key", "GRAFANA_PASSWORD": "grafana"}
VARIANTS = {"cpu": (), "vllm": ("compose.vllm.yaml",), "sglang": ("compose.sglang.yaml",)}


def compose(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    known = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(
        [COMPOSE, "--env-file", os.devnull, *arguments],
        cwd=FOLDER,
        env=known | (SECRETS if environ is None else environ),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(params=VARIANTS)
def project(request: pytest.FixtureRequest) -> dict[str, Any]:
    """One variant as Compose understands it."""
    files = [word for name in ("compose.yaml", *VARIANTS[request.param]) for word in ("-f", name)]
    result = compose(*files, "config", "--format", "json")
    assert result.returncode == 0, result.stderr
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def gateway_config(project: dict[str, Any], name: str) -> Path:
    mounts = {volume["target"]: volume["source"] for volume in project["services"][name]["volumes"]}
    return Path(mounts["/etc/homing/homing.yaml"])


def seconds(text: str) -> float:
    """`1m15s` as 75."""
    parts = re.findall(r"(\d+)([hms])", text)
    return sum(int(count) * {"h": 3600, "m": 60, "s": 1}[unit] for count, unit in parts)


def test_a_missing_secret_is_named() -> None:
    """Nothing starts with an empty token."""
    result = compose("-f", "compose.yaml", "config", environ={})
    assert result.returncode != 0
    assert "copy .env.example to .env" in result.stderr


def test_the_example_of_secrets_names_them_all() -> None:
    """`.env.example` holds every variable that must be set."""
    assert set(re.findall(r"^(\w+)=$", (FOLDER / ".env.example").read_text(), re.MULTILINE)) == set(SECRETS)


def test_images_are_pinned_and_services_restart(project: dict[str, Any]) -> None:
    """No `latest`, no missing tag."""
    for name, service in project["services"].items():
        assert re.search(r":v?\d+\.\d+", service["image"]), name
        assert service["restart"] == "unless-stopped", name


def test_what_is_mounted_exists(project: dict[str, Any]) -> None:
    """Compose would make an empty folder of a misspelt path."""
    sources = {
        Path(volume["source"])
        for service in project["services"].values()
        for volume in service.get("volumes", ())
        if volume["type"] == "bind"
    }
    assert all(source.exists() for source in sources), sources


def test_gateways_are_configured_for_this_project(project: dict[str, Any]) -> None:
    """Their file is valid, reachable from outside, shares bindings, and names services that exist."""
    services = project["services"]
    for name in ("gateway-1", "gateway-2"):
        config = load_config(gateway_config(project, name))
        assert (config.listen.host, config.admin.host) == ("0.0.0.0", "0.0.0.0")
        assert config.sessions.store == "redis"
        hosts = {urlsplit(backend.url).hostname for backend in config.backends}
        assert len(hosts) == 2
        assert hosts <= services.keys()
        assert urlsplit(config.sessions.redis.url or "").hostname in services
        assert set(services[name]["environment"]) >= {"HOMING_ADMIN_TOKEN", "HOMING_KEY_SECRET"}


def test_a_stop_lets_running_answers_finish(project: dict[str, Any]) -> None:
    """The grace period of each service is longer than its drain, and HAProxy's than the gateways'."""
    services = project["services"]
    drain_s = load_config(gateway_config(project, "gateway-1")).drain_timeout_s
    for name, service in services.items():
        if name.startswith(("gateway", "worker", "vllm", "sglang", "haproxy")):
            assert seconds(service["stop_grace_period"]) > drain_s, name
    assert services["haproxy"]["stop_signal"] == "SIGUSR1"


def test_only_the_front_door_is_public(project: dict[str, Any]) -> None:
    """HAProxy listens everywhere, all else on the machine's loopback or not at all."""
    for name, service in project["services"].items():
        for port in service.get("ports", ()):
            assert name == "haproxy" or port["host_ip"] == "127.0.0.1", name


def test_start_order_waits_for_health_not_for_start(project: dict[str, Any]) -> None:
    """HAProxy waits for healthy gateways, those for a healthy Redis, and nobody for a model to load."""
    services = project["services"]
    assert services["redis"]["healthcheck"]
    for name, wanted in (("haproxy", {"gateway-1", "gateway-2"}), ("gateway-1", {"redis"})):
        waits = services[name]["depends_on"]
        assert set(waits) == wanted
        assert {one["condition"] for one in waits.values()} == {"service_healthy"}


def test_our_services_hold_no_privileges(project: dict[str, Any]) -> None:
    """Read-only root, no capabilities, no way to new ones, bounded memory."""
    for name, service in project["services"].items():
        if name.startswith(("gateway", "worker", "haproxy", "redis")):
            assert service["read_only"], name
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["mem_limit"], name


def test_prometheus_scrapes_services_that_exist(project: dict[str, Any]) -> None:
    """Every target of its file is a name on this project's network, and each gateway is one."""
    text = (FOLDER.parent / "prometheus" / "prometheus.yml").read_text()
    targets = {
        target.partition(":")[0]
        for job in yaml.safe_load(text)["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    assert targets >= {"gateway-1", "gateway-2"}
    names = set(project["services"])
    for service in project["services"].values():
        names.update((service["networks"]["default"] or {}).get("aliases", ()))
    assert targets <= names


def test_grafana_finds_its_dashboards_and_prometheus(project: dict[str, Any]) -> None:
    """The provisioning files name the folder where dashboards are mounted, and the service's address."""
    provisioning = FOLDER.parent / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "homing.yaml").read_text())["providers"]
    mounts = {volume["target"]: volume["source"] for volume in project["services"]["grafana"]["volumes"]}
    assert list(Path(mounts[provider["options"]["path"]]).glob("*.json"))
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert urlsplit(source["url"]).hostname in project["services"]
