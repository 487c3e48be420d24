"""What a replica remembers of the shared store, and when it believes it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.local_cache import MAX_FLOORS, LocalCache
from gateway.sessions.records import Record
from gateway.values import BackendId, SessionKey

KEY = SessionKey("k")


def record(version: int = 1, *, expires_at_s: float = 100.0, tokens: int = 0, turns: int = 0) -> Record:
    return Record(BackendId(f"home{version}"), 1, version, expires_at_s, tokens, turns)


def cache(max_entries: int = 10) -> LocalCache:
    return LocalCache(max_entries=max_entries, trust_s=30.0)


def test_entry_is_found_until_it_expires() -> None:
    """At its expiry an entry is gone."""
    local = cache()
    local.put(KEY, record(expires_at_s=100.0), read_at_s=0.0)
    assert local.find(KEY, 99.9) is not None
    assert local.find(KEY, 100.0) is None
    assert len(local) == 0


def test_without_channel_trust_ends_after_a_while() -> None:
    """While moves cannot be heard an entry is trusted for `trust_s` after it was read."""
    local = cache()
    local.put(KEY, record(), read_at_s=10.0)
    entry = local.find(KEY, 50.0)
    assert entry is not None
    assert local.is_trusted(entry, 39.9)
    assert not local.is_trusted(entry, 40.0)


def test_with_channel_trust_lasts() -> None:
    """An entry read since the channel works is trusted as long as it works; an earlier one is not."""
    local = cache()
    local.put(KEY, record(), read_at_s=10.0)
    entry = local.find(KEY, 10.0)
    assert entry is not None
    local.trusted_since_s = 10.0
    assert local.is_trusted(entry, 99.0)
    local.trusted_since_s = 11.0
    assert not local.is_trusted(entry, 99.0)
    local.trusted_since_s = math.inf
    assert not local.is_trusted(entry, 99.0)


def test_confirmation_renews_trust_of_that_version_only() -> None:
    """A renewal that Redis took proves the home it was for, and no other."""
    local = cache()
    local.put(KEY, record(version=2), read_at_s=0.0)
    local.confirm(KEY, 1, read_at_s=50.0)
    entry = local.find(KEY, 60.0)
    assert entry is not None
    assert not local.is_trusted(entry, 60.0)
    local.confirm(KEY, 2, read_at_s=50.0)
    assert local.is_trusted(entry, 60.0)
    local.confirm(SessionKey("absent"), 2, read_at_s=50.0)


def test_void_copy_on_its_way_is_not_kept() -> None:
    """A read that was overtaken by the news of a move does not bring the old home back."""
    local = cache()
    local.drop_below(KEY, 5, 0.0)
    local.put(KEY, record(version=4), read_at_s=0.0)
    assert local.find(KEY, 1.0) is None
    local.put(KEY, record(version=5), read_at_s=0.0)
    assert local.find(KEY, 1.0) is not None


def test_news_of_an_older_move_changes_nothing() -> None:
    """Our own move is heard too, after its result is known: the result stays."""
    local = cache()
    local.put(KEY, record(version=5), read_at_s=0.0)
    local.drop_below(KEY, 5, 0.0)
    local.drop_below(KEY, 3, 0.0)
    assert local.find(KEY, 1.0) is not None
    local.drop_below(KEY, 6, 0.0)
    assert local.find(KEY, 1.0) is None


def test_own_turns_outlive_an_older_read() -> None:
    """A read of the same home does not undo what this replica knows and has not sent yet."""
    local = cache()
    local.put(KEY, record(tokens=10, turns=1), read_at_s=0.0)
    local.renew(KEY, 1, expires_at_s=150.0, context_tokens=500, num_turns=4)
    local.put(KEY, record(tokens=10, turns=1, expires_at_s=90.0), read_at_s=5.0)
    entry = local.find(KEY, 120.0)
    assert entry is not None
    assert (entry.context_tokens, entry.num_turns, entry.read_at_s) == (500, 4, 5.0)


def test_renewal_of_another_version_changes_nothing() -> None:
    """A turn at a former home is not noted on the present one."""
    local = cache()
    local.put(KEY, record(version=2), read_at_s=0.0)
    local.renew(KEY, 1, expires_at_s=999.0, context_tokens=500, num_turns=4)
    local.renew(SessionKey("absent"), 1, expires_at_s=999.0, context_tokens=500, num_turns=4)
    assert local.find(KEY, 500.0) is None
    assert len(local) == 0


def test_bound_drops_the_longest_unused() -> None:
    """At the bound the entry that was written or renewed longest ago goes, and is counted."""
    local = cache(max_entries=2)
    for name in ("1", "2"):
        local.put(SessionKey(name), record(), read_at_s=0.0)
    local.renew(SessionKey("1"), 1, expires_at_s=100.0, context_tokens=0, num_turns=1)
    local.put(SessionKey("3"), record(), read_at_s=0.0)
    assert local.find(SessionKey("2"), 1.0) is None
    assert local.find(SessionKey("1"), 1.0) is not None
    assert local.num_evictions == 1


def test_memory_of_void_versions_is_bounded() -> None:
    """However many moves are heard, only the last ones are remembered."""
    local = cache()
    for number in range(MAX_FLOORS + 5):
        local.drop_below(SessionKey(str(number)), 5, 0.0)
    local.put(SessionKey("0"), record(version=4), read_at_s=0.0)
    local.put(SessionKey(str(MAX_FLOORS)), record(version=4), read_at_s=0.0)
    assert local.find(SessionKey("0"), 1.0) is not None
    assert local.find(SessionKey(str(MAX_FLOORS)), 1.0) is None


def test_later_answer_with_a_smaller_version_is_believed() -> None:
    """When Redis itself has gone back (a fail-over lost a move), what it says later counts, so that all
    replicas agree again; what it said before does not."""
    local = cache()
    local.put(KEY, record(version=7), read_at_s=5.0)
    local.put(KEY, record(version=3), read_at_s=5.0)
    assert local.find(KEY, 6.0).version == 7  # type: ignore[union-attr]  # None fails
    local.put(KEY, record(version=3), read_at_s=6.0)
    assert local.find(KEY, 6.0).version == 3  # type: ignore[union-attr]  # None fails
    local.drop_below(KEY, 9, received_at_s=8.0)
    local.put(KEY, record(version=4), read_at_s=8.0)
    assert local.find(KEY, 9.0) is None
    local.put(KEY, record(version=4), read_at_s=9.0)
    assert local.find(KEY, 9.0) is not None


@given(st.lists(st.tuples(st.sampled_from(["put", "void"]), st.integers(1, 6))))
def test_versions_never_go_back(events: list[tuple[str, int]]) -> None:
    """In any order of arrival, no version is shown that is older than one shown or void before."""
    local = cache()
    least = 0
    for kind, version in events:
        if kind == "put":
            local.put(KEY, record(version=version), read_at_s=0.0)
        else:
            local.drop_below(KEY, version, 0.0)
            least = max(least, version)
        entry = local.find(KEY, 1.0)
        if entry is not None:
            assert entry.version >= least
            least = entry.version
