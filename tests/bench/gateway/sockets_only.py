"""The floor of the gateway's own sockets: its server, upstream pools and relay, joined by a plain hash.

    python sockets_only.py PORT BACKEND_URL...

No facts, sessions, prices, limits, metrics or fail-over. What `homing` costs beyond this is what those cost.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from xxhash import xxh3_64_intdigest

from gateway.downstream.relay import ClientRelay
from gateway.downstream.request import ClientRequest
from gateway.downstream.server import ClientServer
from gateway.downstream.settings import DownstreamSettings
from gateway.upstream.pool import UpstreamPool
from gateway.upstream.settings import UpstreamSettings
from gateway.wire.headers import RequestHeads, response_headers
from gateway.wire.settings import HeaderSettings


async def main(port: int, urls: list[str]) -> None:
    downstream, upstream = DownstreamSettings(), UpstreamSettings()
    pools = [UpstreamPool(url, upstream) for url in urls]
    heads = RequestHeads(HeaderSettings())

    async def serve(request: ClientRequest) -> None:
        body = await request.read_body()
        session_id = request.headers.get("x-session-id", "")
        pool = pools[xxh3_64_intdigest(session_id.encode()) % len(pools)]
        head = heads.build(
            request.method,
            request.raw_path,
            request.raw_headers,
            host=pool.address.host_header.decode(),
            body_length=len(body),
            request_id="-",
        )
        exchange = await pool.open(head, body, method=request.method)
        try:
            relay = ClientRelay(request)
            relay.send_head(
                exchange.status,
                exchange.reason,
                response_headers(exchange.headers),
                content_length=exchange.content_length,
            )
            await exchange.relay(relay)
        finally:
            exchange.abort()

    def handle(request: ClientRequest) -> None:
        request.on_gone = asyncio.ensure_future(serve(request)).cancel

    server = ClientServer(handle, downstream)
    await asyncio.get_running_loop().create_server(server, "127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2:]))
