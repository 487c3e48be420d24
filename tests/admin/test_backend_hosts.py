"""Which hosts may become backends through the API: metadata never, the rest by words, CIDRs and names."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.backend_hosts import check_pattern, is_allowed_address, require_allowed
from gateway.admin.settings import AdminSettings
from gateway.errors import BadRequest
from gateway.upstream.forbidden_peer import is_forbidden

DEFAULT = AdminSettings().allow_backend_hosts


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000",
        "http://[::1]:8000",
        "http://10.1.2.3:8000",
        "http://192.168.0.7",
        "http://100.64.3.4:8000",
        "http://[fd12::7]:8000",
        "http://vllm-0:8000",
        "http://vllm-0.vllm.default.svc:8000",
        "http://gpu.internal:8000",
    ],
)
async def test_the_default_takes_what_is_near(url: str) -> None:
    """Loopback, private networks, and names that only a local resolver knows."""
    await require_allowed(url, DEFAULT)


@pytest.mark.parametrize(
    "url",
    [
        "http://8.8.8.8",
        "https://[2606:4700::1111]",
        "http://0.0.0.0:8000",
        "http://224.0.0.1",
        "unix:/var/run/docker.sock",
    ],
)
async def test_the_default_refuses_what_is_far(url: str) -> None:
    """Public addresses, no addresses, and sockets of this machine."""
    with pytest.raises(BadRequest, match="allow_backend_hosts"):
        await require_allowed(url, DEFAULT)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest",
        "http://[::ffff:169.254.169.254]",
        "http://[64:ff9b::a9fe:a9fe]",
        "http://[2002:a9fe:a9fe::1]",
        "http://[fe80::1]",
        "http://[fd00:ec2::254]",
        "http://2852039166",
        "http://0xa9fea9fe",
        "http://0251.0376.0251.0376",
        "http://169.254.43518",
        "http://metadata.google.internal",
        "http://metadata.google.internal.",
        "http://100.100.100.200",
        "http://[fd00:ec2::23]",
        "http://[fd00:42::42]",
        "http://255.255.255.255",
        "http://0.0.0.0",
        "http://0",
        "http://[::]",
        "http://[::ffff:0:0]",
        "http://0xff.0xff.0xff.0xff",
        "http://[::a9fe:a9fe]",
        "http://metadata.tencentyun.com.",
    ],
)
async def test_metadata_addresses_are_refused_however_spelt(url: str) -> None:
    """Also when the patterns would allow every address and every name."""
    with pytest.raises(BadRequest):
        await require_allowed(url, (*DEFAULT, "0.0.0.0/0", "::/0", "*"))


@pytest.mark.parametrize(
    ("pattern", "url"),
    [
        ("8.8.8.0/24", "http://8.8.8.8"),
        ("*.gpu.example.com", "http://a.gpu.example.com:8000"),
        ("unix:/run/vllm/*.sock", "unix:/run/vllm/0.sock"),
    ],
)
async def test_patterns_allow_more(pattern: str, url: str) -> None:
    """A CIDR, a pattern of names, a pattern of socket paths."""
    check_pattern("allow_backend_hosts", pattern)
    with pytest.raises(BadRequest):
        await require_allowed(url, ())
    await require_allowed(url, (pattern,))


async def test_a_name_is_judged_by_what_it_resolves_to() -> None:
    """`localhost` is no cluster name, and is allowed where loopback is."""
    await require_allowed("http://localhost:1", ("loopback",))
    with pytest.raises(BadRequest):
        await require_allowed("http://localhost:1", ("private", "cluster"))
    await require_allowed("http://localhost:1", ("127.0.0.0/8", "::1/128"))


@pytest.mark.parametrize("pattern", ["10.0.0.0/40", "a b", "", "http://x"])
def test_a_pattern_that_means_nothing_is_refused_at_start(pattern: str) -> None:
    """The error lists what is allowed."""
    with pytest.raises(ValueError, match="is not one of"):
        AdminSettings(allow_backend_hosts=(pattern,))


@given(st.ip_addresses(network="169.254.0.0/16"), st.lists(st.sampled_from([*DEFAULT, "0.0.0.0/0"])))
def test_no_pattern_reaches_link_local(address: ipaddress.IPv4Address, patterns: list[str]) -> None:
    """Nor does the same address mapped into IPv6."""
    mapped = ipaddress.IPv6Address(f"::ffff:{address}")
    assert is_forbidden(address)
    assert is_forbidden(mapped)
    assert not is_allowed_address(mapped, patterns)
