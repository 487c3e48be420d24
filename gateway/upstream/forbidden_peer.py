"""Addresses that no backend can have: metadata services of clouds, link-local and broadcast ones.

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
        "0.0.0.0/8",  # "this host"
        "169.254.0.0/16",  # link-local: AWS, Google, Azure, Hetzner, DigitalOcean, and most others
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure's wire server
        "192.0.0.192/32",  # Oracle
        "192.80.8.124/32",  # Equinix Metal
        "224.0.0.0/4",  # multicast
        "255.255.255.255/32",  # broadcast
        "::/128",
        "fe80::/10",  # link-local
        "ff00::/8",  # multicast
        "fd00:42::42/128",  # Scaleway
        "fd00:c1::a9fe:a9fe/128",  # Oracle
        "fd00:ec2::/32",  # AWS: metadata ::254, names ::253, time ::123, credentials of pods ::23
        "fd20:ce::254/128",  # Google
    )
)
# An IPv4 address in the last 32 bits: IPv4-compatible, NAT64, local NAT64.
_EMBEDDING_NETS = tuple(map(ipaddress.IPv6Network, ("::/96", "64:ff9b::/96", "64:ff9b:1::/48")))
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)  # the 32 bits before that address


def is_forbidden(address: Address) -> bool:
    """Whether it is a metadata or link-local address, also where it is written inside an IPv6 one."""
    spellings = {address, without_wrapping(address)}
    return any(one.version == net.version and one in net for one in spellings for net in _NETS)


def without_wrapping(address: Address) -> Address:
    """`::ffff:169.254.169.254` is 169.254.169.254; so are the 6to4, Teredo, NAT64 and ISATAP spellings."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address.is_loopback or address.is_unspecified:
        return address
    is_embedding = any(address in net for net in _EMBEDDING_NETS)
    if is_embedding or int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def refuse_forbidden_peer(transport: asyncio.BaseTransport) -> None:
    """Close a new connection that has led there. Raises UpstreamConnectFailed."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return  # a Unix socket
    address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    if is_forbidden(address):
        transport.close()
        raise UpstreamConnectFailed(f"its name leads to {address}, where no backend can be")
