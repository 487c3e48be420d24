"""What every session store owes its callers, whatever holds the data."""

from __future__ import annotations

import asyncio

import pytest
from sessions.harness import TTL_S, Harness

from gateway.values import BackendId, Binding, SessionKey

KEY = SessionKey("00112233445566778899aabbccddeeff")
OTHER_KEY = SessionKey("ffeeddccbbaa99887766554433221100")
A, B, C = BackendId("a"), BackendId("b"), BackendId("c")
TEN_KEYS = [SessionKey(f"{i * 7919:032x}") for i in range(10)]


async def claim(harness: Harness, key: SessionKey = KEY, backend_id: BackendId = A) -> Binding:
    """Claim, and insist on an answer."""
    binding = await harness.store.claim(key, backend_id, epoch=1)
    assert binding is not None
    return binding


async def test_unknown_session_has_no_home(harness: Harness) -> None:
    """A key nobody claimed is absent."""
    assert await harness.store.get(KEY) is None


async def test_claim_binds(harness: Harness) -> None:
    """After a claim, get answers the claimed backend with its epoch and size."""
    claimed = await harness.store.claim(KEY, A, epoch=7, context_tokens=1234)
    found = await harness.store.get(KEY)
    assert found is not None
    assert claimed is not None
    assert (found.backend_id, found.epoch, found.context_tokens, found.num_turns) == (A, 7, 1234, 0)
    assert found.version == claimed.version


async def test_first_claim_wins(harness: Harness) -> None:
    """A second claim answers the first one's binding and changes nothing."""
    first = await claim(harness, backend_id=A)
    second = await harness.store.claim(KEY, B, epoch=9)
    assert second is not None
    assert (second.backend_id, second.version, second.epoch) == (A, first.version, 1)


async def test_concurrent_claims_have_one_winner(harness: Harness) -> None:
    """Fifty claims at once for one session all answer the same binding."""
    backends = [BackendId(f"b{i % 4}") for i in range(50)]
    answers = await asyncio.gather(*(harness.store.claim(KEY, backend, 1) for backend in backends))
    assert len({(answer.backend_id, answer.version) for answer in answers if answer}) == 1
    assert all(answers)


async def test_renew_notes_size_and_turns(harness: Harness) -> None:
    """A renewal updates what is known of the session, and never its version."""
    binding = await claim(harness)
    harness.store.renew(KEY, binding, context_tokens=500, num_turns=3)
    await harness.settle()
    found = await harness.store.get(KEY)
    assert found is not None
    assert (found.context_tokens, found.num_turns, found.version) == (500, 3, binding.version)


async def test_rebind_moves_once(harness: Harness) -> None:
    """A move with the right version takes effect and makes a greater version."""
    binding = await claim(harness)
    moved = await harness.store.rebind(KEY, binding.version, B, epoch=2, context_tokens=10)
    assert moved is not None
    assert (moved.backend_id, moved.epoch, moved.context_tokens) == (B, 2, 10)
    assert moved.version > binding.version
    found = await harness.store.get(KEY)
    assert found is not None
    assert (found.backend_id, found.version) == (B, moved.version)


async def test_rebind_keeps_turns(harness: Harness) -> None:
    """A moved session remembers how many turns it has had."""
    binding = await claim(harness)
    harness.store.renew(KEY, binding, context_tokens=5, num_turns=4)
    await harness.settle()
    moved = await harness.store.rebind(KEY, binding.version, B, epoch=1)
    assert moved is not None
    assert moved.num_turns == 4


async def test_rebind_with_old_version_answers_the_holder(harness: Harness) -> None:
    """Of two moves from the same version one wins; the loser is told the winner's home."""
    binding = await claim(harness)
    winner = await harness.store.rebind(KEY, binding.version, B, epoch=1)
    loser = await harness.store.rebind(KEY, binding.version, C, epoch=1)
    assert winner is not None
    assert loser is not None
    assert (loser.backend_id, loser.version) == (B, winner.version)


async def test_concurrent_rebinds_agree(harness: Harness) -> None:
    """Twenty moves at once from one version end in one home that all of them are told."""
    binding = await claim(harness)
    targets = [BackendId(f"t{i}") for i in range(20)]
    answers = await asyncio.gather(
        *(harness.store.rebind(KEY, binding.version, target, 1) for target in targets)
    )
    assert len({(answer.backend_id, answer.version) for answer in answers if answer}) == 1
    assert all(answers)


async def test_rebind_of_absent_session(harness: Harness) -> None:
    """A session that is gone is not brought back by a move."""
    assert await harness.store.rebind(KEY, 1, B, epoch=1) is None
    assert await harness.store.get(KEY) is None


async def test_late_renewal_cannot_restore_an_older_home(harness: Harness) -> None:
    """A renewal that carries the home before a move changes nothing."""
    old = await claim(harness, backend_id=A)
    moved = await harness.store.rebind(KEY, old.version, B, epoch=1, context_tokens=20)
    assert moved is not None
    harness.store.renew(KEY, old, context_tokens=999, num_turns=9)
    await harness.settle()
    found = await harness.store.get(KEY)
    assert found is not None
    assert (found.backend_id, found.version, found.context_tokens) == (B, moved.version, 20)


async def test_renewal_does_not_revive_an_ended_session(harness: Harness) -> None:
    """Ended is ended, even when a turn that began before is noted after."""
    binding = await claim(harness)
    assert await harness.store.end(KEY)
    harness.store.renew(KEY, binding, context_tokens=1, num_turns=1)
    await harness.settle()
    assert await harness.store.get(KEY) is None


async def test_versions_are_never_reused(harness: Harness) -> None:
    """After an end, a new claim has a greater version, so that a move meant for the old one is refused."""
    first = await claim(harness, backend_id=A)
    await harness.store.end(KEY)
    second = await claim(harness, backend_id=B)
    assert second.version > first.version
    held = await harness.store.rebind(KEY, first.version, C, epoch=1)
    assert held is not None
    assert held.backend_id == B


async def test_end_tells_whether_there_was_one(harness: Harness) -> None:
    """End answers true once, then false."""
    await claim(harness)
    assert await harness.store.end(KEY) is True
    assert await harness.store.end(KEY) is False
    assert await harness.store.get(KEY) is None


async def test_entry_expires_at_its_time_to_live(harness: Harness) -> None:
    """Just before its time an entry is there; at its time it is gone and may be claimed anew."""
    await claim(harness, backend_id=A)
    await harness.advance(TTL_S - 1)
    assert await harness.store.get(KEY) is not None
    await harness.advance(1)
    assert await harness.store.get(KEY) is None
    assert (await claim(harness, backend_id=B)).backend_id == B


async def test_renewal_extends_and_reading_does_not(harness: Harness) -> None:
    """Time to live slides with renewals only."""
    renewed, read = KEY, OTHER_KEY
    binding = await claim(harness, key=renewed)
    await claim(harness, key=read)
    await harness.advance(TTL_S - 20)
    harness.store.renew(renewed, binding, context_tokens=1, num_turns=1)
    await harness.store.get(read)
    await harness.settle()
    await harness.advance(30)
    assert await harness.store.get(renewed) is not None
    assert await harness.store.get(read) is None


async def test_expired_session_is_not_revived(harness: Harness) -> None:
    """Neither a renewal nor a move works on an entry whose time is over."""
    binding = await claim(harness)
    await harness.advance(TTL_S)
    harness.store.renew(KEY, binding, context_tokens=1, num_turns=1)
    await harness.settle()
    assert await harness.store.rebind(KEY, binding.version, B, epoch=1) is None
    assert await harness.store.get(KEY) is None


async def test_listing_names_each_session_of_a_backend(harness: Harness) -> None:
    """All pages together hold exactly the backend's sessions, each with its binding."""
    for number, key in enumerate(TEN_KEYS):
        await claim(harness, key=key, backend_id=A if number % 2 else B)
    listed = await list_all(harness, A, limit=2)
    assert sorted(listed) == sorted(TEN_KEYS[1::2])
    assert {binding.backend_id for binding in listed.values()} == {A}


async def test_listing_survives_changes_between_pages(harness: Harness) -> None:
    """Sessions that stay are listed although others end, move and are renewed during the walk."""
    bindings = {key: await claim(harness, key=key) for key in TEN_KEYS}
    page, cursor = await harness.store.list_by_backend(A, limit=3)
    seen = {key for key, _ in page}
    gone = [key for key, _ in page]
    await harness.store.end(gone[0])
    await harness.store.rebind(gone[1], bindings[gone[1]].version, B, epoch=1)
    harness.store.renew(gone[-1], bindings[gone[-1]], context_tokens=1, num_turns=1)
    await harness.settle()
    while cursor is not None:
        page, cursor = await harness.store.list_by_backend(A, cursor=cursor, limit=3)
        seen.update(key for key, _ in page)
    assert set(TEN_KEYS) <= seen


@pytest.mark.parametrize(
    "cursor", ["", "nonsense", "1.5 nobody", "nan x", "inf x", "-1", "99999999", "0 \x00"]
)
async def test_meaningless_cursor_is_harmless(harness: Harness, cursor: str) -> None:
    """A cursor that no page gave out is answered with some page, never an error."""
    await claim(harness)
    page, _ = await harness.store.list_by_backend(A, cursor=cursor)
    assert [key for key, _ in page] in ([KEY], [])


async def test_counts_follow_moves_ends_and_expiry(harness: Harness) -> None:
    """The count of each backend is the number of its living sessions."""
    bindings = [await claim(harness, key=key) for key in TEN_KEYS]
    await harness.store.rebind(TEN_KEYS[0], bindings[0].version, B, epoch=1)
    await harness.store.end(TEN_KEYS[1])
    assert await harness.store.count_by_backend() == {A: 8, B: 1}
    await harness.advance(TTL_S + 1)
    assert await harness.store.count_by_backend() == {}


async def test_unknown_backend_lists_nothing(harness: Harness) -> None:
    """A backend without sessions has an empty listing."""
    assert await harness.store.list_by_backend(BackendId("nobody")) == ([], None)


async def test_odd_keys_and_names_are_kept_apart(harness: Harness) -> None:
    """Keys and names are opaque: braces, blanks, line ends and other alphabets collide with nothing."""
    odd = ["{a}", "a b", "a\nb", "", "ключ", "🙂" * 40, "x" * 500, "%s%d", "*", "{", "}{"]
    for number, text in enumerate(odd):
        bound = await harness.store.claim(SessionKey(text), BackendId(f"b{number}"), 1)
        assert bound is not None, text
    for number, text in enumerate(odd):
        found = await harness.store.get(SessionKey(text))
        assert found is not None, text
        assert found.backend_id == f"b{number}"


async def test_stats_cost_nothing_and_tell_hits(harness: Harness) -> None:
    """A get that finds a session in this process is a local hit; a store in order is not degraded."""
    await claim(harness)
    before = harness.store.stats()
    await harness.store.get(KEY)
    after = harness.store.stats()
    assert after.num_local_hits == before.num_local_hits + 1
    assert after.num_sessions == 1
    assert not after.is_degraded


async def test_local_hit_does_not_suspend(harness: Harness) -> None:
    """A get answered in this process finishes without giving up control: driven by hand, it ends at once."""
    await claim(harness)
    steps = harness.store.get(KEY)
    with pytest.raises(StopIteration) as stop:
        steps.send(None)
    assert stop.value.value is not None


async def list_all(harness: Harness, backend_id: BackendId, limit: int) -> dict[SessionKey, Binding]:
    """All pages of one backend's listing; nothing changes meanwhile, so nothing is listed twice."""
    listed: dict[SessionKey, Binding] = {}
    cursor: str | None = None
    for _ in range(200):
        page, cursor = await harness.store.list_by_backend(backend_id, cursor=cursor, limit=limit)
        assert not listed.keys() & dict(page).keys()
        listed.update(page)
        if cursor is None:
            return listed
    raise AssertionError("the listing does not end")
