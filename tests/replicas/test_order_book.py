"""Orders as values: the laws by which replicas agree, and what is forgotten."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from gateway.replicas.order_book import (
    MAX_NOT_IN_FORCE,
    Order,
    Orders,
    Subject,
    forgettable,
    merge,
    next_ms,
    renew,
    subject_named,
    untold,
)
from gateway.values import BackendId

about: st.SearchStrategy[Literal["state", "weight"]] = st.sampled_from(["state", "weight"])
subjects = st.builds(Subject, st.sampled_from([BackendId(name) for name in ("a", "b", "weight")]), about)


@st.composite
def one_order(draw: st.DrawFn) -> Order:
    """What is ordered follows from the version, as an author gives each version once."""
    ms, author = draw(st.integers(0, 5)), draw(st.sampled_from("xyz"))
    wants: tuple[Literal["", "removed"], ...] = ("", "removed")
    return Order(ms=ms, author=author, renewed_ms=draw(st.integers(0, 3)), wants=wants[ms % 2])


books = st.dictionaries(subjects, one_order())


@given(books, books, books)
def test_knowledge_merges_in_any_order_and_number(a: Orders, b: Orders, c: Orders) -> None:
    """Commutative, associative, idempotent, and nothing later than the result is left."""
    assert merge(a, b) == merge(b, a)
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(a, a) == a
    assert merge(merge(a, b), b) == merge(a, b)
    assert not untold(a, merge(a, b))
    assert not untold(b, merge(a, b))
    assert merge(a, b) == merge(b, untold(a, b))  # telling the difference tells everything


@given(subjects)
def test_a_subject_has_a_name(subject: Subject) -> None:
    """By which it is found again on the board."""
    assert subject_named(str(subject)) == subject


@given(st.integers(0, 9), st.integers(0, 9))
def test_a_new_order_is_later_than_all_that_were_seen(now_ms: int, last_ms: int) -> None:
    """Whatever the clock says, and never earlier than the clock."""
    assert next_ms(now_ms, last_ms) > last_ms
    assert next_ms(now_ms, last_ms) >= now_ms


def state(name: str) -> Subject:
    return Subject(BackendId(name), "state")


def test_orders_in_force_are_renewed_and_others_forgotten() -> None:
    """After half of a lifetime and after a whole one."""
    orders = {state("a"): Order(), state("b"): Order()}
    half = renew(orders, {state("a")}, 51, 100)
    assert half == {state("a"): Order(renewed_ms=51), state("b"): Order()}
    assert renew(orders, {state("a")}, 50, 100) == orders
    assert forgettable(orders, {state("a")}, 100, 100) == {}
    assert forgettable(orders, {state("a")}, 101, 100) == {state("b"): Order()}


def test_the_number_of_orders_about_what_is_gone_is_bounded() -> None:
    """The least recently renewed go, and all replicas choose the same."""
    orders = {state(str(n)): Order(renewed_ms=n) for n in range(MAX_NOT_IN_FORCE + 2)}
    assert forgettable(orders, {state("7")}, 0, 100).keys() == {state("0")}
    assert forgettable(dict(reversed(orders.items())), set(), 0, 100).keys() == {state("0"), state("1")}
