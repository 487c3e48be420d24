"""The ring: agreement between replicas, minimal movement, weights, odd keys, large fleets."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uhashring import HashRing

from gateway.routing.ring import MAX_BACKEND_POINTS, MAX_POINTS, Ring, key_hash
from gateway.routing.settings import RoutingSettings
from gateway.values import BackendId

KEYS = [f"session-{number}" for number in range(2000)]


def ring_of(names: list[str], weight: float = 1.0, virtual_nodes: int = 160) -> Ring:
    return Ring({BackendId(name): weight for name in names}, virtual_nodes)


def owner(ring: Ring, key: str) -> str:
    return next(ring.walk(key))


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.sampled_from([0.0, 0.1, 1.0, 2.5])))
def test_the_points_are_those_of_one_hash_ring(weights: dict[str, float]) -> None:
    """Backends' points are computed apart and merged; a HashRing of all of them has the same."""
    nodes = {name: {"vnodes": max(1, round(8 * weight))} for name, weight in weights.items() if weight}
    whole = HashRing(nodes, hash_fn=key_hash).get_points()
    ring = Ring({BackendId(name): weight for name, weight in weights.items()}, 8)
    assert list(ring.points()) == [(point, BackendId(name)) for point, name in whole]


@given(st.permutations(["a", "b", "c", "d", "e"]), st.lists(st.text(), max_size=20))
def test_order_of_configuration_does_not_matter(names: list[str], keys: list[str]) -> None:
    """Replicas that list the same backends in any order walk every key alike."""
    in_order, shuffled = ring_of(sorted(names)), ring_of(names)
    assert all(list(in_order.walk(key)) == list(shuffled.walk(key)) for key in keys)


@given(st.integers(2, 12), st.data())
def test_removing_a_backend_moves_only_its_own_keys(count: int, data: st.DataObject) -> None:
    """Every key of the removed backend goes to its own next successor; all others stay."""
    names = [f"b{number}" for number in range(count)]
    gone = data.draw(st.sampled_from(names))
    before, after = ring_of(names), ring_of([name for name in names if name != gone])
    for key in KEYS[:200]:
        first, second = list(islice(before.walk(key), 2))
        assert owner(after, key) == (second if first == gone else first)


def test_lost_keys_spread_over_the_survivors() -> None:
    """The keys of one of eight backends go to all seven others, the fullest at most 1.5 × the mean."""
    names = [f"b{number}" for number in range(8)]
    before, after = ring_of(names, virtual_nodes=512), ring_of(names[1:], virtual_nodes=512)
    keys = [f"k{number}" for number in range(20_000)]
    moved = Counter(owner(after, key) for key in keys if owner(before, key) == "b0")
    assert len(moved) == 7
    assert max(moved.values()) / (sum(moved.values()) / 7) <= 1.5


def test_a_new_backend_takes_its_share_and_only_for_itself() -> None:
    """Adding D to A, B, C moves at most 30 % of the keys, and every moved key goes to D."""
    before, after = ring_of(["a", "b", "c"]), ring_of(["a", "b", "c", "d"])
    moved = [key for key in KEYS if owner(before, key) != owner(after, key)]
    assert 0.15 < len(moved) / len(KEYS) <= 0.30
    assert {owner(after, key) for key in moved} == {"d"}


def test_weights_set_the_share_and_zero_keeps_off_the_ring() -> None:
    """A backend of weight 3 owns about three times the keys of one of weight 1."""
    ring = Ring({BackendId("big"): 3.0, BackendId("small"): 1.0, BackendId("none"): 0.0}, 512)
    counts = Counter(owner(ring, key) for key in KEYS)
    assert set(counts) == {"big", "small"}
    assert 2.4 < counts["big"] / counts["small"] < 3.6


@pytest.mark.parametrize("key", ["", " ", "\ud83d", "a\x00b", "x" * 1_000_000, "None", "é" * 99])
def test_odd_keys_have_a_place(key: str) -> None:
    """Empty, surrogate, NUL and huge keys are placed like any other."""
    ring = ring_of(["a", "b", "c"])
    assert owner(ring, key) in {"a", "b", "c"}


def test_empty_ring_names_nobody() -> None:
    """No backends: no owner and no error."""
    ring = ring_of([])
    assert list(ring.walk("key")) == []
    assert ring.owners("key", 3, None, {}) == []


def test_thousand_backends_are_walked_whole() -> None:
    """A walk names every one of 1,000 backends once; the first owners agree with it."""
    names = [f"b{number}" for number in range(1000)]
    ring = ring_of(names, virtual_nodes=40)
    walk = list(ring.walk("key"))
    assert sorted(walk) == sorted(names)
    slot_of = {BackendId(name): number for number, name in enumerate(names)}
    assert ring.owners("key", 5, None, slot_of) == [slot_of[name] for name in walk[:5]]


def test_churn_never_fails_and_comes_back_to_the_same_ring() -> None:
    """100 cycles of removing and adding give the first mapping again."""
    names = [f"b{number}" for number in range(20)]
    reference = ring_of(names, virtual_nodes=20)
    for cycle in range(100):
        ring_of([name for name in names if name != names[cycle % 20]], virtual_nodes=20)
    again = ring_of(list(reversed(names)), virtual_nodes=20)
    assert all(owner(reference, key) == owner(again, key) for key in KEYS)


@pytest.mark.parametrize("virtual_nodes", [1, 160, MAX_BACKEND_POINTS])
@pytest.mark.parametrize("weights", [[1000.0] * 16, [1000.0, 1.0, 0.001], [1e-300, 5e-324], [1.0] * 300])
def test_the_size_of_weights_costs_nothing(weights: list[float], virtual_nodes: int) -> None:
    """S09: rings have a largest size, whoever sets the weights; nobody with a weight is left out."""
    ring = Ring({BackendId(f"b{number}"): weight for number, weight in enumerate(weights)}, virtual_nodes)
    points_of = Counter(backend_id for _, backend_id in ring.points())
    assert len(points_of) == len(weights)
    assert max(points_of.values()) <= MAX_BACKEND_POINTS
    assert sum(points_of.values()) <= MAX_POINTS + len(weights)


def test_only_the_ratio_of_large_weights_counts() -> None:
    """S09: 1000 to 500 is 200 to 100, and weights below the bound keep the points they always had."""
    large, small = (
        Ring({BackendId("a"): 1.0 * size, BackendId("b"): 0.5 * size}, 160) for size in (1000, 200)
    )
    assert list(large.points()) == list(small.points())
    assert len(list(Ring({BackendId("a"): 25.0, BackendId("b"): 1.0}, 160).points())) == 26 * 160


@pytest.mark.parametrize("virtual_nodes", [0, MAX_BACKEND_POINTS + 1, 1_000_000_000])
def test_virtual_nodes_are_bounded(virtual_nodes: int) -> None:
    """G09: a number that no gateway could start with is a mistake in the configuration."""
    with pytest.raises(ValueError, match="virtual_nodes"):
        RoutingSettings(virtual_nodes=virtual_nodes)
