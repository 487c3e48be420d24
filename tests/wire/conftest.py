"""The parser under test, with a fixed secret, and a short way to hand it a request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.values import Api, RequestFacts
from gateway.wire.facts import FactsParser
from gateway.wire.settings import KeySettings

Parse = Callable[..., RequestFacts]


@pytest.fixture
def parser() -> FactsParser:
    return FactsParser(KeySettings(), b"test secret")


@pytest.fixture
def parse(parser: FactsParser) -> Parse:
    """`parse({"model": …}, headers={…}, api=…, tenant=…)` with a dict or bytes as body."""

    def call(
        body: dict[str, Any] | bytes,
        headers: dict[str, str] | list[tuple[bytes, bytes]] | None = None,
        api: Api = Api.CHAT,
        **options: Any,
    ) -> RequestFacts:
        raw = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        if isinstance(headers, dict):
            headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        return parser.parse(api, headers or [], raw, **options)

    return call
