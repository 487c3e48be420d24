"""Which backends stay in spite of their standing: as many as their pools cannot do without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.standing import Member, Models, Standing, spared
from gateway.values import BackendId

WELL, PROBES, OFTEN, FAILED = (
    Standing.WELL,
    Standing.FAILED_PROBES,
    Standing.FAILS_OFTEN,
    Standing.FAILED_REQUESTS,
)
TRIAL, REFUSED, NEW = Standing.ON_TRIAL, Standing.REFUSED, Standing.NEW


def pool(*standings: Standing, models: Models = frozenset({"m"}), prefix: str = "b") -> list[Member]:
    return [
        Member(backend_id=BackendId(f"{prefix}{number}"), models=models, standing=standing)
        for number, standing in enumerate(standings)
    ]


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        ((WELL, WELL), ""),
        ((WELL, PROBES), ""),  # half of them is enough
        ((WELL, PROBES, PROBES), "b1 b2"),  # a third is not: probes are not believed
        ((PROBES,), "b0"),
        ((FAILED,), "b0"),
        ((OFTEN,), "b0"),
        ((REFUSED,), ""),
        ((REFUSED, FAILED), "b1"),
        ((REFUSED, REFUSED, WELL), ""),
        ((NEW, NEW, PROBES), "b2"),  # those that were never ready are no pool
        ((WELL, FAILED, FAILED, FAILED), ""),  # by requests, down to the last
        ((WELL, REFUSED, REFUSED, PROBES), ""),  # half of those that probes can tell apart
        ((WELL, REFUSED, REFUSED, OFTEN), "b3"),  # a share of failures is no reason to have so few
        ((WELL, WELL, OFTEN), ""),
        ((TRIAL, WELL), ""),
        ((TRIAL,), "b0"),
        ((TRIAL, FAILED), "b0"),  # the better one of the two
        ((TRIAL, PROBES), "b0 b1"),
    ],
)
def test_a_pool_keeps_what_it_needs(standings: tuple[Standing, ...], expected: str) -> None:
    """One model, the default threshold."""
    assert " ".join(sorted(spared(pool(*standings), 0.5))) == expected


def test_without_a_threshold_only_the_last_is_kept() -> None:
    """0 turns the panic off, not the rule about the last one."""
    assert spared(pool(WELL, PROBES, PROBES, PROBES), 0.0) == frozenset()
    assert spared(pool(PROBES, PROBES), 0.0) == {"b0", "b1"}


def test_each_model_is_a_pool() -> None:
    """A backend stays if any of its models needs it."""
    members = pool(WELL, WELL, WELL) + pool(PROBES, models=frozenset({"m", "rare"}), prefix="r")
    assert spared(members, 0.5) == {"r0"}
    members += pool(WELL, models=frozenset({"rare"}), prefix="s")
    assert spared(members, 0.5) == frozenset()


def test_a_backend_of_unknown_models_counts_for_all() -> None:
    """Any model is sent there, so it is one that is left."""
    assert spared(pool(WELL, models=None) + pool(PROBES, prefix="p"), 0.5) == frozenset()
    assert spared(pool(WELL) + pool(PROBES, models=None, prefix="p"), 0.5) == frozenset()


def test_those_that_operators_closed_are_not_left() -> None:
    """A draining backend takes no new sessions: the one beside it is the last."""
    closed = Member(backend_id=BackendId("c"), models=frozenset({"m"}), standing=WELL, is_open=False)
    assert spared([*pool(FAILED), closed], 0.5) == {"b0"}
    sick = Member(backend_id=BackendId("c"), models=frozenset({"m"}), standing=FAILED, is_open=False)
    assert spared([*pool(WELL), sick], 0.5) == frozenset()
    assert spared([sick], 0.5) == {"c"}


@given(st.lists(st.sampled_from(list(Standing)), max_size=8), st.floats(0, 1))
def test_somebody_is_always_left(standings: list[Standing], threshold: float) -> None:
    """Whatever the standings: a pool in which somebody listens has somebody in service."""
    members = pool(*standings)
    kept = spared(members, threshold)
    in_service = [one for one in members if one.standing in (WELL, TRIAL) or one.backend_id in kept]
    listening = [one for one in members if one.standing not in (NEW, REFUSED)]
    assert bool(in_service) == bool(listening)
    assert not kept & {one.backend_id for one in members if one.standing in (NEW, REFUSED, WELL)}
