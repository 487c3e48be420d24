"""What Python and the Lua scripts both check is one rule: what one accepts the other accepts too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis as redis_py
from fakes.redis_server import RedisProcess
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.fleet.settings import BackendSettings
from gateway.redis_link.lua import load_script
from gateway.redis_link.settings import RedisSettings
from gateway.replicas.order_book import ORDER_RULE, Order, Subject, subject_named
from gateway.sessions.codec import (
    EPOCH_DIGITS,
    MAX_TOKENS,
    TOKENS_DIGITS,
    TURNS_DIGITS,
    VERSION_DIGITS,
    decode_reply,
    is_storable,
    load_binding_script,
)
from gateway.sessions.redis_store import RedisStore
from gateway.tenants.settings import TenantSettings
from gateway.values import MAX_NAME_LENGTH, BackendId, Name, SessionKey

pytestmark = pytest.mark.redis

SESSION = "homing:{00}:s:" + "0" * 32
KEYS = (SESSION, "homing:{00}:b:", "homing:{00}:names")
READ, CLAIM, ORDERS = load_binding_script("read"), load_binding_script("claim"), "homing:{00}:orders"
TTL_MS = 60_000

ODD_CHARACTERS = "aZ09._-/: {}%\x00\n\xe9\u0660"
names = st.text(ODD_CHARACTERS, max_size=6) | st.builds(
    lambda first, letter, length, last: (first + letter * length)[: length - 1] + last,
    st.sampled_from(["a", "7", ".", "-", "_", ""]),
    st.sampled_from("ab.-_0"),
    st.sampled_from([1, 2, 62, 63, 64, 65, 66, 128, 200]),
    st.sampled_from(["", "a", "-", ".", "\n", "\x00"]),
)


def numbers(width: int) -> st.SearchStrategy[bytes]:
    """Decimals about as long as may be, and what is none."""
    lengths = st.sampled_from([1, 2, width - 1, width, width + 1, 40])
    decimals = st.builds(lambda digit, length: digit * length, st.sampled_from([b"0", b"1", b"9"]), lengths)
    return decimals | st.sampled_from([b"", b"-1", b"1.5", b"1e3", b"+1", b" 1", b"0x1", b"\xd9\xa1"])


values = st.binary(max_size=30) | st.builds(
    lambda head, one, two, three, four, name, tail: (
        b" ".join([head, one, two, three, four, name.encode()]) + tail
    ),
    st.sampled_from([b"1", b"1", b"1", b"2", b"01", b""]),
    numbers(VERSION_DIGITS),
    numbers(EPOCH_DIGITS),
    numbers(TOKENS_DIGITS),
    numbers(TURNS_DIGITS),
    names,
    st.sampled_from([b"", b"", b"", b" ", b"\n", b"\x00", b" x"]),
)


@pytest.fixture(scope="module")
def client(redis_process: RedisProcess) -> Iterator[Any]:
    """A plain client, not asynchronous: hypothesis runs many examples within one test."""
    client = redis_py.Redis.from_url(redis_process.url)
    yield client
    client.close()


@given(values)
@example(b"1 1 1 1 1 " + b"a" * MAX_NAME_LENGTH)
@example(b"1 1 1 1 1 " + b"a" * (MAX_NAME_LENGTH + 1))
@example(b"1 1 1 1 1 .a")
@example(b"1 %b %b %b %b " % (b"9" * 16, b"9" * 18, b"9" * 12, b"9" * 9) + b"a" * 64)
def test_a_binding_is_one_for_both_or_for_neither(client: Any, value: bytes) -> None:
    """H06: any bytes as a session's value. What is none for Python can be claimed at once."""
    client.delete(SESSION)
    client.set(SESSION, value, px=TTL_MS)
    reply = client.eval(READ.text, 1, SESSION)
    record = decode_reply([value, TTL_MS], 0.0)
    assert (reply != -1) == (record is not None)
    claimed = decode_reply(client.eval(CLAIM.text, 3, *KEYS, "z", 1, 1, TTL_MS, "0" * 32, 0), 0.0)
    assert claimed is not None
    assert claimed.backend_id == ("z" if record is None else record.backend_id)


@given(names, st.integers(-1, 10**19), st.integers(-1, 10**13))
@example("a" * MAX_NAME_LENGTH, 10**EPOCH_DIGITS - 1, MAX_TOKENS)
@example("a" * (MAX_NAME_LENGTH + 1), 1, 1)
def test_what_may_be_stored_is_read_by_both(client: Any, name: str, epoch: int, tokens: int) -> None:
    """A home that Python lets through is written so that both read it; what it stops, neither would read."""
    client.delete(SESSION)
    arguments = (name.encode(), epoch, tokens, TTL_MS, "0" * 32, 0)
    written = decode_reply(client.eval(CLAIM.text, 3, *KEYS, *arguments), 0.0)
    read = client.eval(READ.text, 1, SESSION)
    assert (written is not None) == (read != -1) == is_storable(BackendId(name), epoch, tokens)


@pytest.mark.parametrize("length", [64, 65, 200])
async def test_a_long_name_binds_or_is_overwritten(
    shared_redis: RedisProcess, client: Any, length: int
) -> None:
    """H06: a session whose value names a backend of 65 characters can be bound at once."""
    key = SessionKey("0" * 32)
    client.set(SESSION, b"1 5 1 1 1 " + b"a" * length, px=TTL_MS)
    store = RedisStore(RedisSettings(url=shared_redis.url, budget_ms=1000), environ={})
    try:
        held = await store.get(key)
        assert (held is not None) == (length <= MAX_NAME_LENGTH)
        claimed = await store.claim(key, BackendId("b"), 1)
        assert claimed is not None
        assert claimed.backend_id == ("a" * length if length <= MAX_NAME_LENGTH else "b")
    finally:
        await store.close()


def _takes(type_: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, type_)
    except msgspec.ValidationError:
        return False
    return True


def _is_subject(name: str) -> bool:
    try:
        return subject_named(name) == Subject(BackendId(name), "state")
    except ValueError:
        return False


@given(names)
@example("a\n")
@example("a" * 65)
def test_a_name_is_one_everywhere(name: str) -> None:
    """Configuration, admin API, bindings, orders and tenants have the same names."""
    answers = {
        "backends": _takes(BackendSettings, {"url": "http://h:1", "id": name}),
        "admin": _takes(Name, name),
        "bindings": is_storable(BackendId(name), 0, 0),
        "orders": _is_subject(name),
        "tenants": _takes(TenantSettings, {"name": name, "keys_env": "X"}),
    }
    assert len(set(answers.values())) == 1, answers


def test_a_url_without_letters_makes_no_name() -> None:
    """The name that is made of a URL obeys the rule too, or the configuration is refused."""
    assert BackendSettings(url=f"http://{'h' * 60}.example:80").backend_id == ("h" * 60 + ".exa")
    with pytest.raises(ValueError, match="give the backend an id"):
        BackendSettings(url="unix:/\xe9")


MAX_MS = ORDER_RULE["MAX_MS"]
odd: list[Any] = [-1, 1.5, "5", None, True, [], {}]
times = st.sampled_from([0, 1, 5, MAX_MS - 1, MAX_MS, MAX_MS + 1, 2**60, *odd])
authors = st.sampled_from(["", "a", "~", " ", "a" * 64, "a" * 65, "\xe9", "\x7f", "a\n", "\x00", *odd])
fields = st.fixed_dictionaries({}, optional={"ms": times, "author": authors, "renewed_ms": times})


@given(fields)
def test_an_order_is_one_for_both_or_for_neither(client: Any, order: dict[str, Any]) -> None:
    """What Python refuses stands in no order's way; what it reads gives way to later ones only."""
    text = json.dumps(order).encode()
    try:
        known: Order | None = msgspec.json.decode(text, type=Order)
    except msgspec.ValidationError:
        known = None
    script = load_script("orders", constants=ORDER_RULE)
    first, last = Order(), Order(ms=MAX_MS, author="~" * 64, renewed_ms=MAX_MS)
    for told in (first, last):
        client.delete(ORDERS)
        client.hset(ORDERS, "a", text)
        stored = client.eval(script.text, 1, ORDERS, TTL_MS, 1, "a", msgspec.json.encode(told))[1]
        assert (stored != text) == told.is_later(known)


def test_malformed_json_is_no_order(client: Any) -> None:
    """It gives way to any."""
    script = load_script("orders", constants=ORDER_RULE)
    told = msgspec.json.encode(Order())
    for text in (b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff", b"\x00"):
        client.delete(ORDERS)
        client.hset(ORDERS, "a", text)
        assert client.eval(script.text, 1, ORDERS, TTL_MS, 1, "a", told)[1] == told
