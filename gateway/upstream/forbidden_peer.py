"""Addresses that no backend can have: the metadata services of clouds, and link-local ones.

A name that an operator registers is judged when it is added, but what it resolves to later is in the hands of
whoever runs its DNS. So every new connection is looked at once more, before the first byte is sent on it.
"""

from __future__ import annotations

import asyncio
import ipaddress

from gateway.errors import UpstreamConnectFailed

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NETS = tuple(
    ipaddress.ip_network(net)
    for net in (
        "169.254.0.0/16",  # link-local: AWS, Google, Azure, and most others
        "fe80::/10",
        "fd00:ec2::254/128",  # AWS over IPv6
        "fd20:ce::254/128",  # Google over IPv6
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure's wire server
        "192.0.0.192/32",  # Oracle
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_forbidden(address: Address) -> bool:
    """Whether it is a metadata or link-local address, also where it is written inside an IPv6 one."""
    plain = without_wrapping(address)
    return any(plain in net for net in _NETS if net.version == plain.version)


def without_wrapping(address: Address) -> Address:
    """`::ffff:169.254.169.254` is 169.254.169.254; so are the 6to4 and NAT64 spellings."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else address


def refuse_forbidden_peer(transport: asyncio.BaseTransport) -> None:
    """Close a new connection that has led there. Raises UpstreamConnectFailed."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return  # a Unix socket
    address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    if is_forbidden(address):
        transport.close()
        raise UpstreamConnectFailed(f"its name leads to {address}, where no backend can be")
