"""The OpenAPI document is valid, complete, and true: a fuzzer that believes it finds no other answer."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.gateway_world import GatewayWorld
from openapi_spec_validator import OpenAPIV31SpecValidator

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """The fuzzer sets log levels too."""
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


async def test_the_document_is_valid_and_names_every_operation() -> None:
    """OpenAPI 3.1; each operation once, with an id, and every reference resolves."""
    async with GatewayWorld(num_backends=1) as world:
        found: dict[str, Any] = (await world.admin.get("/admin/openapi.json")).json()
        OpenAPIV31SpecValidator(found).validate()
        operations = [one for path in found["paths"].values() for one in path.values()]
        ids = [one["operationId"] for one in operations]
        assert len(ids) == len(set(ids)) >= 25
        assert all({"401", "403"} <= one["responses"].keys() for one in operations)


@pytest.mark.timeout(300)
async def test_a_fuzzer_finds_no_answer_that_is_not_declared(tmp_path: Path) -> None:
    """Schemathesis asks every operation, with good and bad input: no 500, no undeclared status or shape."""
    async with GatewayWorld(num_backends=2) as world:
        for number in range(4):
            await world.chat(f"session-{number}")
        fuzzer = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{world.admin.base_url}/admin/openapi.json",
            f"--checks={','.join(CHECKS)}",
            "--phases=coverage,fuzzing",
            "--max-examples=4",
            "--generation-deterministic",
            "--no-shrink",
            "--no-color",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await fuzzer.communicate()
        assert fuzzer.returncode == 0, told.decode()
