"""To whom an operator may have a backend's key sent: only to hosts that the configuration sends it to."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.gateway_world import GatewayWorld, ProbedBackend

from gateway.admin.backend_keys import require_key_allowed
from gateway.config.config import ConfigError, parse_config
from gateway.errors import BadRequest
from gateway.fleet.settings import BackendSettings
from gateway.process.gateway import Gateway
from gateway.values import BackendId

ENVIRON = {"ENGINE_KEY": "secret-engine", "OTHER_KEY": "secret-other", "HOMING_KEY_SECRET": "s"}
CONFIG = {
    "admin": {"key_hosts": {"OTHER_KEY": ["10.0.0.0/8", "*.gpu.example"]}},
    "backends": [
        {"id": "near", "url": "http://10.1.2.3:8000", "api_key_env": "ENGINE_KEY"},
        {"id": "far", "url": "https://engine.example:8443", "api_key_env": "ENGINE_KEY"},
        {"id": "local", "url": "unix:/run/engine.sock", "api_key_env": "ENGINE_KEY"},
    ],
}


async def ask(url: str, variable: str | None, environ: dict[str, str] = ENVIRON) -> None:
    backend = BackendSettings(url=url, api_key_env=variable)
    await require_key_allowed(backend, parse_config(CONFIG), environ)


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("http://10.1.2.3:8001", "ENGINE_KEY"),  # another engine of that machine
        ("https://ENGINE.example", "ENGINE_KEY"),
        ("unix:/run/engine.sock", "ENGINE_KEY"),
        ("http://10.9.9.9:8000", "OTHER_KEY"),  # by key_hosts
        ("https://a.gpu.example", "OTHER_KEY"),
        ("http://192.168.0.1", None),
    ],
)
async def test_a_key_goes_where_the_configuration_sends_it(url: str, variable: str | None) -> None:
    """To a configured host on any port, to a host listed for this key, and no key goes anywhere."""
    await ask(url, variable)


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("http://10.1.2.4:8000", "ENGINE_KEY"),  # a neighbour
        ("http://engine.example:8443", "ENGINE_KEY"),  # in plain text
        ("https://10.1.2.3:8000", "ENGINE_KEY"),
        ("https://engine.example.evil.example", "ENGINE_KEY"),
        ("unix:/run/other.sock", "ENGINE_KEY"),
        ("http://10.1.2.3:8000", "OTHER_KEY_2"),
        ("http://10.1.2.3:8000", "HOMING_KEY_SECRET"),  # a secret of the gateway's, of no backend
        ("http://192.168.0.1:8000", "OTHER_KEY"),
        ("http://gpu.example", "OTHER_KEY"),
    ],
)
async def test_a_key_goes_nowhere_else(url: str, variable: str) -> None:
    """Whoever may add backends may not choose who is told the key."""
    with pytest.raises(BadRequest, match="api_key_env") as refusal:
        await ask(url, variable)
    assert refusal.value.param == "api_key_env"
    assert "secret-" not in refusal.value.message


async def test_a_variable_that_is_not_set_is_refused() -> None:
    """The backend would be asked without a key, or with the client's."""
    with pytest.raises(BadRequest, match="environment"):
        await ask("http://10.1.2.3:8001", "ENGINE_KEY", environ={})


def test_a_wrong_pattern_is_found_at_start() -> None:
    """With the option's path."""
    with pytest.raises(ConfigError, match=r"admin: key_hosts\.K: 'a b'"):
        parse_config({"admin": {"key_hosts": {"K": ["a b"]}}})


async def test_an_added_backend_is_sent_the_key_of_its_host_and_no_other() -> None:
    """On the wire: the key of the configuration for the same host; a refused order changes nothing."""
    async with ProbedBackend() as configured, ProbedBackend() as added:
        one: dict[str, Any] = {"id": "k0", "url": configured.base_url, "engine": "vllm"}
        keyed = [{**one, "api_key_env": "ENGINE_KEY"}]
        async with GatewayWorld(0, environ=ENVIRON, backends=keyed) as world:
            spec = {**one, "id": "k1", "url": added.base_url}
            refused = await world.admin.post(
                "/admin/v1/backends", json={**spec, "api_key_env": "HOMING_KEY_SECRET"}
            )
            assert (refused.status_code, refused.json()["param"]) == (400, "api_key_env")
            assert "k1" not in world.gateway.fleet.view.backends
            taken = await world.admin.post("/admin/v1/backends", json={**spec, "api_key_env": "ENGINE_KEY"})
            assert taken.status_code == 201
            await world.wait_for(
                lambda: world.gateway.fleet.view.backends[BackendId("k1")].state.value == "ready"
            )
            assert (await world.admin.delete("/admin/v1/backends/k0")).status_code == 204
            assert (await world.chat("alice")).status_code == 200
        sent = {name.lower(): value for name, value in added.requests[-1].headers}
        assert sent["authorization"] == "Bearer secret-engine"


async def test_a_configured_key_that_is_not_set_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The gateway starts all the same: one backend without its key must not keep the others from serving."""
    backends = [{"id": "k0", "url": "http://127.0.0.1:9", "api_key_env": "FORGOTTEN_KEY"}]
    gateway = Gateway(parse_config({"admin": {"port": 0}, "listen": {"port": 0}, "backends": backends}))
    await gateway.start()
    await gateway.stop(drain_timeout_s=0)
    (record,) = [one for one in caplog.records if one.getMessage() == "backend_key_missing"]
    assert vars(record)["fields"] == {"backend": "k0", "api_key_env": "FORGOTTEN_KEY"}
