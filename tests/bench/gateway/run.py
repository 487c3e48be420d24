"""`make bench-gateway`: Homing and other gateways against one mock engine, interleaved on one machine.

    python tests/bench/gateway/run.py [--only NAME,...] [--scenarios NAME,...] [--repetitions 3]
           [--python PATH]

Each gateway is pinned to the last CPU, engine and load to the first, so CPU time per request is what to
compare; rates and tails also show the machine's other load. Never asserts: it prints and stores.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gateway.bodies import write_bodies
from bench.gateway.measure import SCENARIOS, Scenario, measure, run_load, set_engine, stop, wait_ready
from bench.gateway.peers import BACKEND_PORTS, PEERS, Peer, homing_under, start
from bench.gateway.report import Runs, write_report

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "homing" / "bench"
RESULTS = HERE.parent / "results"
READY_TIMEOUT_S = 90.0
LIMIT_S = 3_600
ENDING_SIGNALS = {signal.SIGALRM, signal.SIGINT, signal.SIGTERM}

Running = dict[str, list[subprocess.Popen[bytes]]]  # peer -> its processes; the first is the measured one


def compile_tool(name: str) -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    program = CACHE / name
    subprocess.run(["cc", "-O2", "-o", program, HERE / f"{name}.c"], check=True, timeout=120)
    return program


class OutOfTime(Exception):
    """The benchmark took too long. No TimeoutError: that is an OSError, which `wait_ready` catches."""


def end_cleanly(limit_s: int) -> None:
    """From now on SIGTERM ends this process as Ctrl-C does, so that what it started is stopped.

    Raises OutOfTime in the main thread after `limit_s`.
    """

    def give_up(number: int, frame: object) -> None:
        raise OutOfTime(f"not done after {limit_s} s")

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGALRM, give_up)
    signal.signal(signal.SIGTERM, end)
    signal.alarm(limit_s)


@contextmanager
def only_run() -> Iterator[None]:
    """Wait for other runs of this benchmark: they use the same ports, and the same CPUs."""
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def choose(arguments: argparse.Namespace) -> tuple[list[Peer], list[Scenario]]:
    only = arguments.only.split(",") if arguments.only else None
    names = arguments.scenarios.split(",") if arguments.scenarios else None
    offered = list(PEERS)
    if arguments.python:
        offered.insert(1, homing_under(arguments.python))
    peers = [peer for peer in offered if only is None or any(peer.name.startswith(name) for name in only)]
    return peers, [scenario for scenario in SCENARIOS if names is None or scenario.name in names]


def start_all(peers: list[Peer], running: Running) -> list[str]:
    """Install and start what can be; return why the rest is not there.

    Changes `running`, also when it is interrupted: whoever owns it ends what is in it.
    """
    absent: list[str] = []
    for peer in peers:
        try:
            peer.install(CACHE)
        except (subprocess.SubprocessError, OSError) as error:
            absent.append(f"{peer.name}: cannot be installed ({error})")
            continue
        if not peer.is_available(CACHE):
            absent.append(f"{peer.name}: this machine has no {peer.program}")
            continue
        processes = running[peer.name] = start(peer, CACHE)
        if wait_ready(peer.port, READY_TIMEOUT_S) and processes[0].poll() is None:
            print(f"ready: {peer.name}", flush=True)
        else:
            stop_all({peer.name: processes})
            del running[peer.name]
            absent.append(f"{peer.name}: did not become ready; see {CACHE / 'run'}")
    return absent


def stop_all(running: Running) -> None:
    """End all of them, whatever signal arrives meanwhile."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        for process in itertools.chain(*running.values()):
            stop(process)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)


def start_engine(program: Path, ports: Sequence[int]) -> subprocess.Popen[bytes]:
    """One mock engine on the first CPU that is a backend at each port."""
    command = ["taskset", "--cpu-list", "0", str(program), *map(str, ports)]
    return subprocess.Popen(command, start_new_session=True)


def measure_all(
    targets: dict[str, tuple[int, int]],  # name -> port, pid
    scenarios: list[Scenario],
    bodies: dict[str, Path],
    generator: Path,
    repetitions: int,
) -> Runs:
    """Every target in every scenario, all targets once before any is measured again."""
    runs: Runs = {name: {} for name in targets}
    for repetition in range(repetitions + 1):  # the first is warm-up
        for scenario in scenarios:
            set_engine(BACKEND_PORTS[0], scenario)
            for name, (port, pid) in targets.items():
                if name.startswith("litellm") and scenario.num_connections > 32:
                    continue  # it needs minutes for what the others do in seconds
                if repetition == 0:
                    run_load(generator, port, scenario, bodies[scenario.bodies], "0")
                    continue
                result = measure(generator, port, pid, scenario, bodies[scenario.bodies], "0")
                runs[name].setdefault(scenario.name, []).append(result)
                _print_run(repetition, scenario, name, result)
    return runs


def _print_run(repetition: int, scenario: Scenario, name: str, result: dict[str, Any]) -> None:
    metric = "cpu_us_per_event" if scenario.is_stream else "cpu_us_per_request"
    text = (
        result.get("failure") or f"{result.get(metric, 0):9.1f} {metric}, {result['requests_per_s']:9.0f}/s"
    )
    print(f"{repetition} {scenario.name:20} {name:30} {text}", flush=True)


def run_all(arguments: argparse.Namespace, engine_program: Path, generator: Path) -> tuple[Runs, list[str]]:
    """Start everything, measure, stop everything. Returns the runs and who is missing, with the reason."""
    peers, scenarios = choose(arguments)
    bodies = write_bodies(CACHE / "bodies")
    engine = start_engine(engine_program, BACKEND_PORTS)
    running: Running = {}
    try:
        absent = start_all(peers, running)
        targets = {"direct": (BACKEND_PORTS[0], engine.pid)}
        targets |= {
            peer.name: (peer.port, running[peer.name][0].pid) for peer in peers if peer.name in running
        }
        return measure_all(targets, scenarios, bodies, generator, arguments.repetitions), absent
    finally:
        stop_all({**running, "engine": [engine]})


def describe(command: str) -> dict[str, Any]:
    """What was run, of which commit, and on what."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    model = next(
        (
            line.partition(": ")[2]
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown",
    )
    return {
        "command": command,
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} × {model}",
        "software": f"Linux {platform.release()}, Python {platform.python_version()}",
        "load at the start": " ".join(f"{value:.1f}" for value in os.getloadavg()),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="comma-separated beginnings of names; homing is needed for ratios")
    parser.add_argument("--scenarios", help="comma-separated names of scenarios")
    parser.add_argument("--python", help="also run Homing under this interpreter")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--name", default="gateway", help="name of the result files")
    arguments = parser.parse_args()
    with only_run():  # other checkouts compile to the same place, too
        engine_program, generator = compile_tool("mock_engine"), compile_tool("load_generator")
        environment = describe(f"make bench-gateway ({arguments.repetitions} repetitions after one warm-up)")
        end_cleanly(LIMIT_S)
        runs, absent = run_all(arguments, engine_program, generator)
    RESULTS.mkdir(parents=True, exist_ok=True)
    stored = {"environment": environment, "absent": absent, "runs": runs}
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(stored, indent=1))
    print(write_report(RESULTS, arguments.name, environment, runs, absent).read_text())


if __name__ == "__main__":
    main()
