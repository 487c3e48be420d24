"""The data API under a fuzzer that knows its shape: no 500, and every refusal in its dialect's own words."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from fakes.backend import respond
from fakes.gateway_world import GatewayWorld

DOCUMENT = Path(__file__).with_name("data_api.yaml")
CHECKS = ("not_a_server_error", "status_code_conformance", "response_schema_conformance")


@pytest.mark.timeout(180)
async def test_fuzzed_requests_are_answered_or_refused_in_their_dialect(tmp_path: Path) -> None:
    """Well-formed and malformed requests to every path: a status of the list, a body of the shape."""
    async with GatewayWorld(num_backends=2) as world:
        for backend in world.backends:
            backend.default = respond(
                b'{"object": "answer"}'
            )  # an engine would judge; here the gateway is asked
        fuzzer = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            str(DOCUMENT),
            f"--url={world.base_url}",
            f"--checks={','.join(CHECKS)}",
            "--phases=coverage,fuzzing",
            "--max-examples=20",
            "--generation-deterministic",
            "--no-shrink",
            "--no-color",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await fuzzer.communicate()
        assert fuzzer.returncode == 0, told.decode()
        assert sum(len(backend.requests) for backend in world.backends) > 100
        world.assert_idle()
