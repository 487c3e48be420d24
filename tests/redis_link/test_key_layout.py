"""The names of everything in Redis: fixed for all replicas and versions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from gateway.redis_link.key_layout import NUM_CLUSTER_SHARDS, KeyLayout
from gateway.values import BackendId, SessionKey

KEY = SessionKey("00112233445566778899aabbccddeeff")


def test_shards_are_the_same_in_every_process() -> None:
    """The shard of a key is a fixed function of its text: replicas must agree on where it lies."""
    layout = KeyLayout("homing", NUM_CLUSTER_SHARDS)
    assert layout.shard_of(KEY) == 48
    assert layout.shard_of(SessionKey("f" * 32)) == 17
    assert KeyLayout("homing", 1).shard_of(KEY) == 0


def test_names() -> None:
    """What an operator finds in Redis."""
    layout = KeyLayout("homing", NUM_CLUSTER_SHARDS)
    assert layout.session(7, KEY) == "homing:{07}:s:" + KEY
    assert layout.index(7, BackendId("gpu-0")) == layout.index_prefix(7) + "gpu-0" == "homing:{07}:b:gpu-0"
    assert layout.names(7) == "homing:{07}:names"
    assert layout.probe(7) == "homing:{07}:probe"
    assert layout.loads == "homing:{00}:load"
    assert (layout.moves_channel, layout.beat_channel("r1")) == ("homing:moves", "homing:beat:r1")


@given(st.text(max_size=40), st.text("ab.-_", min_size=1, max_size=20))
def test_all_keys_of_a_shard_lie_in_one_cluster_slot(key: str, backend: str) -> None:
    """Whatever is in a session key, braces too, its shard's keys can be touched by one script."""
    layout = KeyLayout("homing", NUM_CLUSTER_SHARDS)
    shard = layout.shard_of(SessionKey(key))
    names = [
        layout.session(shard, SessionKey(key)),
        layout.index(shard, BackendId(backend)),
        layout.names(shard),
        layout.probe(shard),
    ]
    assert len({key_slot(name.encode("utf-8", "surrogatepass")) for name in names}) == 1
