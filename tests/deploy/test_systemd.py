"""The systemd units, judged by systemd itself: valid, sandboxed, consistent with what they start."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.front_proxy import require

from gateway.config.config import Config
from gateway.process.systemd import NAMES

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
SERVICES = ("homing-gateway.service", "homing-worker@.service")
MOST_EXPOSURE = 2.0  # of 10, by systemd's own scale; 9.2 is a service without any sandboxing


def read(name: str) -> configparser.ConfigParser:
    """A unit; of repeated keys the last one counts here."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keys are CamelCase
    unit.read(UNITS / name)
    return unit


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units with a program in the place of the installed one, so that systemd finds it."""
    for source in UNITS.glob("homing-*"):
        text = source.read_text().replace("/opt/homing/bin/homing", sys.executable)
        (tmp_path / source.name.replace("@.", "@0.")).write_text(text)
    return tmp_path


def test_systemd_accepts_the_units(installed: Path) -> None:
    """No unknown key, no missing program, no cycle: not a word of complaint."""
    units = sorted(str(path) for path in installed.iterdir())
    assert len(units) == 3
    command = [require("systemd-analyze"), "verify", "--man=no", *units]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    complaints = [line for line in result.stderr.splitlines() if "homing" in line]
    assert complaints == []


@pytest.mark.parametrize("name", SERVICES)
def test_systemd_finds_little_exposure(installed: Path, name: str) -> None:
    """`systemd-analyze security` offline: within the limit."""
    path = installed / name.replace("@.", "@0.")
    command = [require("systemd-analyze"), "security", "--offline=true", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", result.stdout)
    assert found is not None, result.stderr
    assert float(found[1]) <= MOST_EXPOSURE


def test_a_stop_is_given_time_to_drain() -> None:
    """The gateway's default drain fits, and the worker's two drains together."""
    gateway, worker = read(SERVICES[0])["Service"], read(SERVICES[1])["Service"]
    assert float(gateway["TimeoutStopSec"].removesuffix("s")) > Config().drain_timeout_s
    hook_s = float(re.search(r"timeout (\d+)", worker["ExecStop"])[1])  # type: ignore[index]  # None fails
    drain_s = float(re.search(r"--drain-timeout (\d+)", worker["ExecStart"])[1])  # type: ignore[index]  # None fails
    assert float(worker["TimeoutStopSec"].removesuffix("s")) > hook_s + drain_s


def test_the_socket_unit_names_its_socket_as_the_gateway_expects() -> None:
    """And the gateway tells when it is ready, as Type=notify wants."""
    assert read("homing-gateway.socket")["Socket"]["FileDescriptorName"] in NAMES
    assert read("homing-gateway.service")["Service"]["Type"] == "notify"
