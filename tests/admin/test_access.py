"""Who may use the admin API: two roles by token, loopback without one, and no page of another origin."""

from __future__ import annotations

from typing import Any

from fakes.gateway_world import GatewayWorld

from gateway.request.operator_tokens import Tokens

BOTH = {"HOMING_ADMIN_TOKEN": "operate-me", "HOMING_ADMIN_READ_TOKEN": "read-me"}
ROUTE = {"body": {"model": "fake-model", "messages": [{"role": "user", "content": "x"}]}}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def ask(world: GatewayWorld, method: str, path: str, **more: Any) -> tuple[int, str]:
    answer = await world.admin.request(method, f"/admin/v1{path}", **more)
    return answer.status_code, answer.headers.get("content-type", "")


async def test_two_tokens_two_roles() -> None:
    """The read token reads and asks; only the operator's token changes; neither means 401."""
    async with GatewayWorld(num_backends=1, environ=BOTH) as world:
        problem = "application/problem+json"
        assert await ask(world, "GET", "/status") == (401, problem)
        assert await ask(world, "GET", "/status", headers=bearer("guess")) == (401, problem)
        assert await ask(world, "GET", "/status", headers={"authorization": "Basic cmVhZC1tZQ=="}) == (
            401,
            problem,
        )
        for token in ("read-me", "operate-me"):
            assert (await ask(world, "GET", "/status", headers=bearer(token)))[0] == 200
            assert (await ask(world, "POST", "/route", headers=bearer(token), json=ROUTE))[0] == 200
        assert await ask(world, "POST", "/backends/b0/drain", headers=bearer("read-me")) == (403, problem)
        assert (await ask(world, "POST", "/backends/b0/drain", headers=bearer("operate-me")))[0] == 200


async def test_a_token_of_odd_bytes_is_only_a_wrong_token() -> None:
    """Bytes that are no text are compared and refused, not an error of ours."""
    async with GatewayWorld(num_backends=1, environ=BOTH) as world:
        headers = [(b"authorization", b"Bearer \xff\xfe")]
        assert (await ask(world, "GET", "/status", headers=headers))[0] == 401
        debug = [(b"x-homing-log-level", b"debug"), (b"x-homing-admin-token", b"\xff\xfe")]
        assert (await world.client.get("/v1/models", headers=debug)).status_code == 200


async def test_a_read_token_alone_makes_a_read_only_api() -> None:
    """No operator's token: nobody may change anything, not even from loopback."""
    async with GatewayWorld(num_backends=1, environ={"HOMING_ADMIN_READ_TOKEN": "read-me"}) as world:
        assert (await ask(world, "GET", "/status", headers=bearer("read-me")))[0] == 200
        assert (await ask(world, "POST", "/backends/b0/drain", headers=bearer("read-me")))[0] == 403
        assert (await ask(world, "POST", "/backends/b0/drain", headers={"authorization": "Bearer"}))[0] == 401


ORIGINS: list[tuple[dict[str, str], int]] = [
    ({}, 200),
    ({"host": "localhost:8001"}, 200),
    ({"host": "[::1]:8001"}, 200),
    ({"host": "127.0.0.1"}, 200),
    ({"host": "console.example"}, 200),
    ({"host": "evil.example"}, 403),
    ({"host": "localhost.evil.example"}, 403),
    ({"host": ""}, 403),
    ({"host": "[::1]evil.com"}, 403),
    ({"host": "[::1]:80:evil.com"}, 403),
    ({"host": "localhost:1@evil.com"}, 403),
    ({"host": "localhost:99999"}, 403),
    ({"host": "localhost:"}, 403),
    ({"host": "localhost/evil.com"}, 403),
    ({"host": "localhost, evil.com"}, 403),
    ({"host": "localhost:8001", "origin": "http://localhost:8001"}, 200),
    ({"host": "localhost:8001", "origin": "http://evil.example"}, 403),
    ({"host": "localhost:8001", "origin": "http://localhost:9999"}, 403),
    ({"origin": "null"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"sec-fetch-site": "same-site"}, 403),
    ({"sec-fetch-site": "same-origin"}, 200),
]


async def test_without_a_token_no_other_page_can_ask() -> None:
    """DNS rebinding shows in the Host, a foreign page in Origin or Sec-Fetch-Site."""
    async with GatewayWorld(num_backends=1, admin={"port": 0, "allowed_hosts": ["console.example"]}) as world:
        for headers, status in ORIGINS:
            assert (await ask(world, "GET", "/status", headers=headers))[0] == status, headers
            assert (await ask(world, "POST", "/backends/b0/cordon", headers=headers))[0] == status, headers


async def test_a_body_must_be_declared_as_json() -> None:
    """A form that a page submits is refused before it is read."""
    async with GatewayWorld(num_backends=1) as world:
        for content_type in ("text/plain", "application/x-www-form-urlencoded", None):
            headers = {} if content_type is None else {"content-type": content_type}
            assert (await ask(world, "POST", "/route", headers=headers, content=b"{}"))[0] == 415


async def test_what_is_open_holds_nothing() -> None:
    """Liveness needs no token; everything under /admin/v1 does, and so does its description."""
    async with GatewayWorld(num_backends=1, environ=BOTH) as world:
        assert (await world.admin.get("/livez")).status_code == 200
        assert (await world.admin.get("/admin/openapi.json")).status_code == 401
        for operation in (await world.admin.get("/admin/openapi.json", headers=bearer("read-me"))).json()[
            "paths"
        ]:
            path = operation.replace("{name}", "b0").replace("{key}", "0" * 32)
            answer = await world.admin.request("GET", path)
            assert answer.status_code in (401, 405), path


async def test_errors_are_problems_whatever_went_wrong() -> None:
    """Unknown paths and methods too, with Allow; every answer forbids caching and sniffing."""
    async with GatewayWorld(num_backends=1) as world:
        for method, path, status in (("GET", "/nothing", 404), ("PUT", "/backends", 405)):
            answer = await world.admin.request(method, f"/admin/v1{path}")
            assert answer.status_code == status
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["status"] == status
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert set((await world.admin.put("/admin/v1/backends")).headers["allow"].split(",")) >= {
            "GET",
            "POST",
        }


def test_tokens_do_not_show() -> None:
    """A log line or a traceback that prints them gives nothing away."""
    assert "secret" not in repr(Tokens(operate="secret", read="secret"))
