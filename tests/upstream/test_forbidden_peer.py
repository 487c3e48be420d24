"""A connection that leads to a metadata address is closed before anything is sent on it."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import UpstreamConnectFailed
from gateway.upstream.forbidden_peer import refuse_forbidden_peer


class ConnectedTransport(asyncio.BaseTransport):
    """A transport that says where it leads."""

    def __init__(self, peer: object) -> None:
        super().__init__({"peername": peer})
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    "peer",
    [
        ("169.254.169.254", 80),
        ("::ffff:169.254.169.254", 80, 0, 0),
        ("fe80::1%eth0", 80, 0, 2),
        ("fd00:ec2::254", 80, 0, 0),
        ("fd00:ec2::23", 80, 0, 0),
        ("fd00:42::42", 80, 0, 0),
        ("fd00:c1::a9fe:a9fe", 80, 0, 0),
        ("fd20:ce::254", 80, 0, 0),
        ("255.255.255.255", 80),
        ("0.0.0.0", 80),
        ("::", 80, 0, 0),
        ("239.1.2.3", 80),
        ("ff02::1", 80, 0, 0),
        ("::169.254.169.254", 80, 0, 0),
        ("64:ff9b:1::a9fe:a9fe", 80, 0, 0),
        ("fd12::5efe:a9fe:a9fe", 80, 0, 0),
        ("2001:0:102:304::5601:5601", 80, 0, 0),
    ],
)
def test_metadata_peers_are_closed(peer: tuple[object, ...]) -> None:
    """Whatever the name was when it was registered."""
    transport = ConnectedTransport(peer)
    with pytest.raises(UpstreamConnectFailed, match="no backend can be"):
        refuse_forbidden_peer(transport)
    assert transport.is_closed


@pytest.mark.parametrize(
    "peer", [("127.0.0.1", 80), ("::1", 80), ("10.0.0.1", 80), ("fd12::1", 80, 0, 0), "/run/x", "", None]
)
def test_all_others_stay(peer: object) -> None:
    """Addresses of machines, and sockets without any."""
    transport = ConnectedTransport(peer)
    refuse_forbidden_peer(transport)
    assert not transport.is_closed
