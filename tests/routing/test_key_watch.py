"""Keys that never repeat and keys that everybody shares are found out; honest ones are left alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.key_watch import KeyWatch, KeyWatchSettings
from gateway.values import Api, KeySource, Message, RequestFacts, SessionKey


def turn(key: str, conversation: int, number: int, speaker: int | None = None) -> RequestFacts:
    """The facts of turn `number` of a conversation, under a key."""
    messages = [Message(chain_hash=1, num_bytes=100), Message(chain_hash=1000 + conversation, num_bytes=20)]
    told = conversation if speaker is None else speaker  # answers differ even where questions do not
    messages += [Message(chain_hash=hash((told, n)), num_bytes=50) for n in range(2 * number)]
    return RequestFacts(
        api=Api.CHAT,
        session_key=SessionKey(key),
        key_source=KeySource.HEADER,
        prefix=tuple(messages),
        is_follow_up=number > 0,
    )


def test_honest_sessions_are_never_touched() -> None:
    """200 conversations of ten turns under their own keys: every request keeps its key."""
    watch = KeyWatch(KeyWatchSettings())
    for number in range(10):
        for conversation in range(200):
            facts = turn(f"s{conversation}", conversation, number)
            assert watch.judge(facts) is facts


def test_an_id_that_never_repeats_gives_way_to_the_conversation() -> None:
    """A request id under a session's name: after enough follow-ups the opener is the key, one per chat."""
    watch = KeyWatch(KeyWatchSettings(min_follow_ups=20))
    keys: dict[int, set[str | None]] = {}
    for number in range(20):
        for conversation in range(5):
            judged = watch.judge(turn(f"r{conversation}-{number}", conversation, number))
            if number > 10:
                assert judged.key_source is KeySource.FINGERPRINT
                keys.setdefault(conversation, set()).add(judged.session_key)
    assert all(len(found) == 1 for found in keys.values())
    assert len(set.union(*keys.values())) == 5
    assert watch.num_unstable > 0


def test_sessions_that_all_begin_alike_keep_their_keys() -> None:
    """A thousand honest sessions with the same first words, interleaved: none is put aside."""
    watch = KeyWatch(KeyWatchSettings(min_follow_ups=20))
    for number in range(4):
        for session in range(1000):
            facts = turn(f"s{session}", 7, number)
            assert watch.judge(facts) is facts


def test_a_restart_in_the_middle_is_forgiven() -> None:
    """A gateway that meets only follow-ups at first believes them from then on."""
    watch = KeyWatch(KeyWatchSettings(min_follow_ups=20))
    for number in range(3, 8):
        for session in range(100):
            facts = turn(f"s{session}", 7, number, speaker=session)
            assert watch.judge(facts) is facts


def test_one_bad_client_does_not_spoil_the_source_for_others() -> None:
    """With half of the traffic honest the header stays believed."""
    watch = KeyWatch(KeyWatchSettings(min_follow_ups=20))
    for number in range(30):
        for conversation in range(5):
            watch.judge(turn(f"r{conversation}-{number}", conversation, number))
            facts = turn(f"s{conversation}", 100 + conversation, number)
            assert watch.judge(facts) is facts


def test_a_key_shared_by_many_conversations_is_no_session() -> None:
    """A constant id: beyond the limit its requests go by their prompt, within the load bound."""
    watch = KeyWatch(KeyWatchSettings(max_conversations_per_key=8))
    judged = [watch.judge(turn("constant", conversation, 0)) for conversation in range(20)]
    assert all(facts.session_key is not None for facts in judged[:8])
    assert all(facts.session_key is None and facts.obeys_load_bound for facts in judged[8:])
    assert watch.num_shared == 12


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
    assert judged[-1] is None


def test_compaction_is_not_sharing() -> None:
    """T6: a client that rewrites its opening a few times keeps its session."""
    watch = KeyWatch(KeyWatchSettings())
    for rewrite in range(6):
        for number in range(1, 20):
            assert watch.judge(turn("alice", 50 + rewrite, number)).session_key == "alice"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), max_size=200))
def test_memory_is_bounded_and_nothing_fails(turns: list[tuple[int, int, int]]) -> None:
    """Whatever comes, no more than the allowed number of entries is kept."""
    watch = KeyWatch(KeyWatchSettings(memory_entries=5, max_conversations_per_key=3, min_follow_ups=5))
    for key, conversation, number in turns:
        watch.judge(turn(f"k{key}", conversation, number))
        assert len(watch._prompts) <= 5
        assert len(watch._records_of_keys) <= 5
        for record in watch._records_of_keys.values():
            assert len(record.conversations) <= 4
            assert len(record.recent) <= 12
