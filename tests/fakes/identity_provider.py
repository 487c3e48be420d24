"""An identity provider on loopback: publishes its public keys over HTTP and signs tokens."""

from __future__ import annotations

import json
import time
from typing import Any

import jwt
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import ec, rsa

RSA = {name: rsa.generate_private_key(public_exponent=65537, key_size=2048) for name in ("one", "two")}
EC = ec.generate_private_key(ec.SECP256R1())


def public(key_id: str, key: Any = None, **fields: Any) -> dict[str, Any]:
    algorithm = jwt.algorithms.ECAlgorithm if key is EC else jwt.algorithms.RSAAlgorithm
    private: Any = key or RSA[key_id]
    described = algorithm.to_jwk(private.public_key(), as_dict=True)
    return {**described, "kid": key_id, "use": "sig", **fields}


class IdentityProvider:
    """An identity provider: publishes `keys`, or answers `status`."""

    def __init__(self) -> None:
        self.keys = [public("one"), public("ec", EC)]
        self.status = 200
        self.body: bytes | None = None
        self.num_asked = 0
        application = web.Application()
        application.router.add_get("/keys", self._answer)
        application.router.add_get("/elsewhere", self._answer)
        self.server = TestServer(application)

    async def _answer(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        if self.status == 302:
            return web.Response(status=302, headers={"location": "/elsewhere"})
        body = self.body if self.body is not None else json.dumps({"keys": self.keys}).encode()
        return web.Response(status=self.status, body=body)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/keys"))


def token(key_id: str | None = "one", *, key: Any = None, algorithm: str = "RS256", **claims: Any) -> str:
    body = {
        "iss": "https://id.example",
        "aud": "homing",
        "exp": time.time() + 300,
        "tenant": "team-a",
        **claims,
    }
    body = {name: value for name, value in body.items() if value is not None}
    headers = None if key_id is None else {"kid": key_id}
    return jwt.encode(body, key or RSA[key_id or "one"], algorithm=algorithm, headers=headers)
