"""Ids that never repeat and ids that everybody shares are found out; no good session pays for them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.key_watch import KeyWatch, KeyWatchSettings
from gateway.values import Api, KeySource, Message, RequestFacts, SessionKey

SHARED = KeyWatchSettings(max_conversations_per_key=8)
UNSTABLE = KeyWatchSettings(min_follow_ups=20)


def turn(
    key: str,
    conversation: int,
    number: int,
    speaker: int | None = None,
    *,
    tenant: str = "default",
    name: str = "x-session-id",
) -> RequestFacts:
    """The facts of turn `number` of a conversation, under a key."""
    messages = [Message(chain_hash=1, num_bytes=100), Message(chain_hash=1000 + conversation, num_bytes=20)]
    told = conversation if speaker is None else speaker  # answers differ even where questions do not
    messages += [Message(chain_hash=hash((tenant, told, n)), num_bytes=50) for n in range(2 * number)]
    return RequestFacts(
        api=Api.CHAT,
        tenant=tenant,
        session_key=SessionKey(key),
        key_source=KeySource.HEADER,
        key_name=name,
        fingerprint=SessionKey(f"fingerprint-{conversation}"),
        prefix=tuple(messages),
        is_follow_up=number > 0,
    )


def spoil(
    watch: KeyWatch, num_turns: int = 20, *, tenant: str = "default", name: str = "x-session-id"
) -> None:
    """Send follow-ups of five conversations, each under an id of its own."""
    for number in range(num_turns):
        for conversation in range(5):
            watch.judge(
                turn(f"r{tenant}{conversation}-{number}", conversation, number, tenant=tenant, name=name)
            )


def test_honest_sessions_are_never_touched() -> None:
    """200 conversations of ten turns under their own keys: every request keeps its key."""
    watch = KeyWatch(KeyWatchSettings())
    for number in range(10):
        for conversation in range(200):
            facts = turn(f"s{conversation}", conversation, number)
            assert watch.judge(facts) is facts


def test_an_id_that_never_repeats_gives_way_to_the_conversation() -> None:
    """A request id under a session's name: after enough follow-ups the fingerprint is the key."""
    watch = KeyWatch(UNSTABLE)
    keys: dict[int, set[str | None]] = {}
    for number in range(20):
        for conversation in range(5):
            judged = watch.judge(turn(f"r{conversation}-{number}", conversation, number))
            if number > 10:
                assert judged.key_source is KeySource.FINGERPRINT
                assert judged.obeys_load_bound
                assert judged.ignored_id is not None
                assert judged.ignored_id.reason == "never_repeats"
                keys.setdefault(conversation, set()).add(judged.session_key)
    assert keys == {conversation: {f"fingerprint-{conversation}"} for conversation in range(5)}
    assert watch.num_unstable > 0


def test_sessions_that_all_begin_alike_keep_their_keys() -> None:
    """A thousand honest sessions with the same first words, interleaved: none is put aside."""
    watch = KeyWatch(UNSTABLE)
    for number in range(4):
        for session in range(1000):
            facts = turn(f"s{session}", 7, number)
            assert watch.judge(facts) is facts


def test_a_restart_in_the_middle_is_forgiven() -> None:
    """A gateway that meets only follow-ups at first believes them from then on."""
    watch = KeyWatch(UNSTABLE)
    for number in range(3, 8):
        for session in range(100):
            facts = turn(f"s{session}", 7, number, speaker=session)
            assert watch.judge(facts) is facts


def test_one_bad_client_does_not_spoil_the_source_for_others() -> None:
    """With half of the traffic honest the header stays believed."""
    watch = KeyWatch(UNSTABLE)
    for number in range(30):
        for conversation in range(5):
            watch.judge(turn(f"r{conversation}-{number}", conversation, number))
            facts = turn(f"s{conversation}", 100 + conversation, number)
            assert watch.judge(facts) is facts


def test_a_session_that_was_known_keeps_its_id_whatever_others_send() -> None:
    """Even where all other ids of its tenant and header never repeat, more of them than are remembered."""
    watch = KeyWatch(KeyWatchSettings(min_follow_ups=20, memory_entries=50))
    for number in range(2):
        watch.judge(turn("good", 900, number))
    for number in range(2, 12):
        spoil(watch, 30)
        facts = turn("good", 900, number)
        assert watch.judge(facts) is facts
    assert watch.num_unstable > 0


def test_a_session_that_begins_under_a_bad_source_has_one_key() -> None:
    """Its id is ignored from first to last, so that it never changes its key."""
    watch = KeyWatch(UNSTABLE)
    keys = set()
    for number in range(12):
        spoil(watch)
        keys.add(watch.judge(turn("late", 901, number)).session_key)
    assert keys == {"fingerprint-901"}


def test_what_one_tenant_or_header_sends_is_no_evidence_against_another() -> None:
    """New sessions elsewhere keep their ids, from the first turn on."""
    watch = KeyWatch(UNSTABLE)
    spoil(watch)
    assert watch.judge(turn("new", 5, 0)).ignored_id is not None
    for tenant, name in (("other", "x-session-id"), ("default", "session_id")):
        for number in range(3):
            facts = turn(f"new-{tenant}-{name}", 77, number, tenant=tenant, name=name)
            assert watch.judge(facts) is facts


def test_a_mended_client_is_believed_again() -> None:
    """Evidence fades: after honest turns new ids count."""
    watch = KeyWatch(UNSTABLE)
    spoil(watch)
    assert watch.judge(turn("n1", 200, 0)).ignored_id is not None
    for number in range(200):
        watch.judge(turn("mended", 300, number))
    facts = turn("n2", 400, 0)
    assert watch.judge(facts) is facts


def test_a_key_shared_by_many_conversations_names_one_of_them() -> None:
    """A constant id: beyond the limit its conversations go by their fingerprints; the oldest keeps the id."""
    watch = KeyWatch(SHARED)
    keys: dict[int, set[str | None]] = {}
    for number in range(6):
        for conversation in range(20):
            judged = watch.judge(turn("constant", conversation, number))
            if number > 2:
                keys.setdefault(conversation, set()).add(judged.session_key)
    assert all(len(found) == 1 for found in keys.values())
    counted = Counter(next(iter(found)) for found in keys.values())
    assert counted["constant"] <= 1
    assert len(counted) == 20
    assert watch.num_shared > 50


def test_helpers_under_its_id_never_cost_a_session_its_key() -> None:
    """A one-shot request with its own prompt after each turn, for 60 turns."""
    watch = KeyWatch(KeyWatchSettings())
    for number in range(60):
        facts = turn("session", 1, number)
        assert watch.judge(facts) is facts
        watch.judge(turn("session", 1000 + number, 0))
    assert watch.num_shared > 0


def test_sub_agents_with_turns_of_their_own_never_cost_a_session_its_key() -> None:
    """Each sub-agent has five turns under the session's id; the session goes on between them."""
    watch = KeyWatch(KeyWatchSettings(max_conversations_per_key=4))
    number = 0
    for agent in range(30):
        for step in range(5):
            facts = turn("session", 1, number)
            assert watch.judge(facts) is facts
            number += 1
            watch.judge(turn("session", 1000 + agent, step))


def test_a_key_that_only_its_session_uses_is_not_shared_any_more() -> None:
    """The verdict ends when the reason has ended."""
    watch = KeyWatch(SHARED)
    for conversation in range(20):
        watch.judge(turn("id", conversation, 0))
        watch.judge(turn("id", 1, conversation + 1))
    assert watch.is_suspect("default", "x-session-id", SessionKey("id"))
    for number in range(21, 21 + 4 * 8):
        watch.judge(turn("id", 1, number))
    assert not watch.is_suspect("default", "x-session-id", SessionKey("id"))


def test_a_sliding_window_is_not_sharing() -> None:
    """A client that sends only the last turns has another opening every time: still one session."""
    watch = KeyWatch(KeyWatchSettings(max_conversations_per_key=4))
    for step in range(40):
        facts = turn("chat", step, 3 if step else 0)
        assert watch.judge(facts) == facts
        assert watch.judge(facts) == facts  # sent again by an impatient client


def test_conversations_that_take_turns_under_one_key_are_found_in_the_middle() -> None:
    """A gateway that met none of their beginnings sees openers come back, and takes the key for shared."""
    watch = KeyWatch(KeyWatchSettings(max_conversations_per_key=4))
    judged = [
        watch.judge(turn("constant", conversation, number)).session_key
        for number in range(3, 9)
        for conversation in range(9)
    ]
    assert judged[0] == "constant"
    assert judged[-1] == "fingerprint-8"


def test_compaction_is_not_sharing() -> None:
    """T6: a client that rewrites its opening a few times keeps its session."""
    watch = KeyWatch(KeyWatchSettings())
    for rewrite in range(6):
        for number in range(1, 20):
            assert watch.judge(turn("alice", 50 + rewrite, number)).session_key == "alice"


def test_without_a_fingerprint_an_ignored_id_leaves_the_prompt_group() -> None:
    """A first turn that is too short to tell is placed by its system prompt, as without an id."""
    watch = KeyWatch(SHARED)
    for conversation in range(10):
        watch.judge(turn("constant", conversation, 0))
    facts = turn("constant", 11, 0)
    short = RequestFacts(
        api=Api.CHAT,
        session_key=facts.session_key,
        key_source=facts.key_source,
        key_name=facts.key_name,
        prefix=facts.prefix,
    )
    judged = watch.judge(short)
    assert (judged.session_key, judged.key_source) == (None, KeySource.NONE)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), max_size=200))
def test_memory_is_bounded_and_nothing_fails(turns: list[tuple[int, int, int]]) -> None:
    """Whatever comes, no more than the allowed number of entries is kept."""
    watch = KeyWatch(KeyWatchSettings(memory_entries=5, max_conversations_per_key=3, min_follow_ups=5))
    for key, conversation, number in turns:
        watch.judge(turn(f"k{key}", conversation, number))
        for table in (watch._prompts, watch._new_keys, watch._known_keys):
            assert len(table) <= 5
        for record in [*watch._new_keys.values(), *watch._known_keys.values()]:
            assert len(record.conversations) <= 4
            assert max(len(record.recent), len(record.turns), len(record.ignored)) <= 12
