"""Building redis-py clients: one server, behind Sentinels, or a Cluster; TLS and ACL users in each.

What is set here and why:

* no retries: with redis-py's defaults a refused connection costs 4 s and a silent server 5 s per command;
* RESP2 and no CLIENT SETINFO: one round trip less per new connection, and no push handlers;
* no timeout of a command: `trips.py` ends one that hangs. redis-py's own is in wall time, so that a late loop
  fails commands that Redis has answered;
* more connections than commands can be in flight. redis-py's Sentinel and Cluster pools raise at once when
  they are full, and its blocking pool supports a single server only, so `link.py` has its own semaphore, the
  same for all three.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any, Protocol

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.redis_link.connection import Era, measured
from gateway.redis_link.settings import RedisSettings, parse_address


class CommandClient(Protocol):
    """The methods used of a redis-py client, whatever its kind."""

    async def execute_command(self, *args: Any) -> Any: ...

    async def aclose(self) -> None: ...


class _KnownCommands:
    """Tells redis-py's Cluster client where the key of a command is. By default it fetches and parses the
    table of all commands at each refresh of the node map, which blocked the loop for 0.24 s (measured on a
    busy machine) in the middle of a fail-over. It handles scripts without the table; in the other commands
    that we send to a Cluster the key comes first."""

    async def initialize(self, node: object = None) -> None:
        """Do nothing: no table is needed."""

    async def get_keys(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments[1:2]


class RedisClients:
    """Creates the client for commands and, one at a time, clients for subscriptions."""

    def __init__(self, settings: RedisSettings, environ: Mapping[str, str] = os.environ) -> None:
        self._settings = settings
        self._environ = environ
        self._sentinel: Any = None
        self._cluster: Any = None
        self._era = Era()

    @property
    def is_cluster(self) -> bool:
        return bool(self._settings.cluster_nodes)

    def open(self) -> CommandClient:
        """Create the client for commands. Opens no connection yet."""
        settings = self._settings
        options = self._connection_options() | {"socket_timeout": None}
        client: Any
        if settings.cluster_nodes:
            return self._open_cluster(options)
        if settings.sentinels:
            make_sentinel: Any = Sentinel  # untyped in redis-py
            self._sentinel = make_sentinel(
                [parse_address(address) for address in settings.sentinels],
                sentinel_kwargs=self._sentinel_options(),
                db=settings.database,
                **options,
                **self._tls_options(),
            )
            client = self._sentinel.master_for(settings.sentinel_service)
        else:
            client = self._open_url(options)
        pool = client.connection_pool
        pool.connection_class = measured(pool.connection_class, self._era)
        return client  # type: ignore[no-any-return]  # redis-py's classes fit the Protocol loosely

    def renew(self) -> None:
        """Replace each connection for commands before it is used again; the name is resolved again. A Cluster
        is left alone: its client follows the nodes."""
        self._era.number += 1

    def open_subscriber(self) -> Redis:
        """Create a separate client for one subscription: to the server, to any node of a Cluster (each node
        forwards messages to all), or to the current master behind Sentinels."""
        options = self._connection_options()
        options["max_connections"] = 1
        if self._cluster is not None:
            # At random, so that a node that is down is not chosen every time.
            known = [(node.host, node.port) for node in self._cluster.get_nodes()]
            host, port = random.choice(known or list(map(parse_address, self._settings.cluster_nodes)))
            return Redis(host=host, port=port, **options, **self._tls_options())
        if self._sentinel is not None:
            return self._sentinel.master_for(self._settings.sentinel_service)  # type: ignore[no-any-return]
        return self._open_url(options)

    async def aclose(self) -> None:
        if self._sentinel is not None:
            await self._sentinel.aclose()

    def _open_cluster(self, options: dict[str, Any]) -> CommandClient:
        nodes = [ClusterNode(host, port) for host, port in map(parse_address, self._settings.cluster_nodes)]
        # This retry does not repeat a slow command: it is how the client follows a fail-over.
        options["retry"] = Retry(NoBackoff(), 1)
        client: Any = RedisCluster(startup_nodes=nodes, **options, **self._tls_options())
        client.commands_parser = _KnownCommands()
        kind = measured(client.connection_kwargs["connection_class"], self._era)
        client.connection_kwargs["connection_class"] = kind  # of nodes that are discovered
        for node in client.nodes_manager.startup_nodes.values():
            node.connection_class = kind
        self._cluster = client
        return client  # type: ignore[no-any-return]  # as above

    def _open_url(self, options: dict[str, Any]) -> Redis:
        url = self._settings.resolved_url(self._environ).reveal()
        if self._settings.tls.enabled and url.startswith("redis://"):
            url = "rediss://" + url.removeprefix("redis://")
        if url.startswith("rediss://"):
            options |= self._tls_options(is_url=True)
        if url.startswith("unix://"):
            del options["socket_keepalive"]  # TCP only; redis-py's Unix connections reject the argument
        return Redis.from_url(url, **options)

    def _connection_options(self) -> dict[str, Any]:
        settings = self._settings
        password = settings.password(self._environ)
        options: dict[str, Any] = {
            "socket_timeout": settings.socket_timeout_ms / 1000,
            "socket_connect_timeout": settings.socket_timeout_ms / 1000,
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
            "max_connections": 2 * settings.pool_size,
            "protocol": 2,
            "driver_info": None,
        }
        if settings.username is not None:
            options["username"] = settings.username
        if password:
            options["password"] = password.reveal()
        return options

    def _sentinel_options(self) -> dict[str, Any]:
        options = {**self._connection_options(), **self._tls_options()}
        options.pop("username", None)
        options.pop("password", None)
        password = self._settings.sentinel_password(self._environ)
        if password:
            options["password"] = password.reveal()
        return options

    def _tls_options(self, *, is_url: bool = False) -> dict[str, Any]:
        tls = self._settings.tls
        if not (tls.enabled or is_url):
            return {}
        options: dict[str, Any] = {
            "ssl_ca_certs": tls.ca_file,
            "ssl_certfile": tls.cert_file,
            "ssl_keyfile": tls.key_file,
            "ssl_check_hostname": tls.check_hostname,
        }
        return options if is_url else {"ssl": True, **options}
