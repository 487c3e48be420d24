"""Conversations that nobody named are recognised by how they began, whatever changes around that."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.values import Api, KeySource, RequestFacts
from gateway.wire.facts import FactsParser
from gateway.wire.fingerprints import stable_sentence
from gateway.wire.settings import KeySettings

Parse = Callable[..., RequestFacts]
User = dict[str, Any]

QUESTION = "How do I read a file line by line without loading all of it?"


def user(content: Any) -> User:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> User:
    return {"role": "assistant", "content": content, **fields}


def chat(*messages: User, system: str | None = None, **fields: Any) -> dict[str, Any]:
    head = [{"role": "system", "content": system}] if system is not None else []
    return {"model": "m", "messages": [*head, *messages], **fields}


def talk(opening: str, num_turns: int, *, name: str = "") -> list[User]:
    """A conversation of `num_turns` turns that waits for its next answer."""
    messages = [user(opening)]
    for number in range(1, num_turns):
        messages += [assistant(f"answer {number} {name}".strip()), user(f"question {number} {name}".strip())]
    return messages


# -- short openings


@pytest.mark.parametrize("opening", ["Hi", "hello", "?", "你好", "Hey! 👋", "ping", ""])
def test_a_short_opening_is_recognised_from_the_second_turn_on(parse: Parse, opening: str) -> None:
    """Without a key in its first turn, and then with one that stays."""
    system = "You help people. Be brief."
    assert parse(chat(*talk(opening, 1), system=system)).session_key is None
    facts = [parse(chat(*talk(opening, turns), system=system)) for turns in range(2, 12)]
    assert {each.key_source for each in facts} == {KeySource.FINGERPRINT}
    assert len({each.session_key for each in facts}) == 1


def test_chats_that_all_open_with_hi_are_told_apart(parse: Parse) -> None:
    """Fifty people say "Hi" and then something of their own; or get an answer of their own."""
    keys = {parse(chat(*talk("Hi", 3, name=f"of {number}"))).session_key for number in range(50)}
    keys |= {
        parse(chat(user("Hi"), assistant(f"Hello {number}!"), user("ok"))).session_key for number in range(50)
    }
    assert len(keys - {None}) == 100


def test_a_long_opening_has_its_key_from_the_first_turn_on(parse: Parse) -> None:
    """The same in every turn."""
    keys = {parse(chat(*talk(QUESTION, turns))).session_key for turns in range(1, 8)}
    assert len(keys) == 1
    assert None not in keys


def test_an_opening_of_several_messages_counts_as_one(parse: Parse) -> None:
    """What stands before the first answer is the opening: a short greeting and a long question suffice."""
    first = parse(chat(user("Hi"), user(QUESTION)))
    later = parse(chat(user("Hi"), user(QUESTION), assistant("So."), user("And then?")))
    assert first.key_source is KeySource.FINGERPRINT
    assert first.session_key == later.session_key


def test_forks_and_regenerations(parse: Parse) -> None:
    """After a long opening they stay with the conversation that they come from; a short one is its own
    conversation when its first answer, or what follows it, is another."""
    base = parse(chat(*talk(QUESTION, 3))).session_key
    assert parse(chat(user(QUESTION), assistant("another answer"), user("go on"))).session_key == base
    short = parse(chat(*talk("Hi", 3))).session_key
    fork = chat(user("Hi"), assistant("answer 1"), user("something else"))
    regenerated = chat(user("Hi"), assistant("another answer"), user("question 1"))
    keys = {short, parse(fork).session_key, parse(regenerated).session_key}
    assert len(keys - {None}) == 3
    later_fork = chat(*talk("Hi", 2), assistant("answer 2"), user("another third question"))
    assert parse(later_fork).session_key == short


@pytest.mark.parametrize("opening", ["Fix it", QUESTION])
def test_tools_instead_of_a_second_question(parse: Parse, opening: str) -> None:
    """Agents: the first answer calls tools, and no user turn follows for long."""
    call = assistant(None, tool_calls=[{"id": "c1", "type": "function", "function": {"name": "ls"}}])
    result = {"role": "tool", "tool_call_id": "c1", "content": "a b c"}
    turns = [user(opening), call, result]
    keys = {parse(chat(*turns)).session_key}
    for number in range(5):
        turns += [call, result | {"content": f"{number}"}]
        keys.add(parse(chat(*turns)).session_key)
    assert len(keys) == 1
    assert None not in keys


def test_answers_without_their_thoughts_are_the_same_answers(parse: Parse) -> None:
    """Thoughts are sent back with the last answer and left out of older ones."""
    answer = [
        {"type": "thinking", "thinking": "Hm, a greeting.", "signature": "s"},
        {"type": "text", "text": "Hello!"},
    ]
    second = chat(user("Hi"), assistant(answer), user("Tell me more"))
    third = chat(user("Hi"), assistant("Hello!"), user("Tell me more"), assistant("No."), user("Why?"))
    keys = {parse(body, api=Api.MESSAGES).session_key for body in (second, third)}
    assert len(keys) == 1
    assert None not in keys


@pytest.mark.parametrize("length", [5, 60, 40_000])
def test_cache_markers_that_move_on_change_nothing(parse: Parse, length: int) -> None:
    """A marked turn is a list of parts; unmarked, one turn later, it is a string. Long turns, too."""
    opening = "word " * (length // 5)

    def marked(text: str) -> User:
        return user([{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}])

    second = chat(user(opening), assistant("Yes."), marked("go on"))
    third = chat(user(opening), assistant("Yes."), user("go on"), assistant("No."), marked("why"))
    keys = {parse(body, api=Api.MESSAGES).session_key for body in (second, third)}
    if length > 32:
        keys.add(parse(chat(marked(opening)), api=Api.MESSAGES).session_key)
    assert len(keys) == 1
    assert None not in keys


def test_items_of_the_responses_api(parse: Parse) -> None:
    """Reasoning and calls are answers; the output of a call is what comes next."""
    first = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    items = [
        first,
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a b"},
    ]
    more = [*items, {"type": "message", "role": "assistant", "content": []}, user("thanks")]
    without_thoughts = [item for item in more if item is not items[1]]
    assert parse({"model": "m", "input": [first]}, api=Api.RESPONSES).session_key is None
    keys = {parse({"model": "m", "input": each}, api=Api.RESPONSES).session_key for each in (items, more)}
    assert len(keys) == 1
    assert None not in keys
    assert parse({"model": "m", "input": without_thoughts}, api=Api.RESPONSES).session_key is not None


# -- volatile system prompts

STABLE = (
    "You are a careful assistant for the people of our workshop. Answer in short sentences and name your "
    "sources where you have any.\nNever guess."
)
CLOCKS = {
    "iso": ("2026-11-{day}T08:1{n}:00Z", "2026-12-0{n}T10:15:0{n}Z"),
    "english": ("Sunday, November {day}, 2026, 8:1{n} PM", "Monday, December {n}, 2026"),
    "german": ("Heute ist Sonntag, der {day}. November 2026, 08:1{n} Uhr", "Montag, {n}. Dezember 2026"),
    "french": ("Nous sommes le dimanche {day} novembre 2026 à 8 h 1{n}", "lundi {n} décembre"),
    "spanish": ("Hoy es domingo {day} de noviembre de 2026", "Hoy es lunes {n} de diciembre"),
    "chinese": ("现在是2026年11月{day}日 8时1{n}分", "今天是二〇二六年十二月一日星期二"),
    "japanese": ("令和8年11月{day}日(日曜日)午前8時1{n}分", "令和八年十二月一日火曜日"),
    "korean": ("2026년 11월 {day}일 일요일 오전 8시 1{n}분", "2026년 12월 1일 화요일"),
    "arabic": ("اليوم ٢٩ نوفمبر ٢٠٢٦", "اليوم ٣٠ نوفمبر ٢٠٢٦"),
    "hindi": ("आज २९ नवंबर २०२६ है", "आज ३० नवंबर २०२६ है"),
    "no year": ("It is {day} Nov, 8:1{n}", "It is 1 Dec, 9:0{n}"),
    "day alone": ("Today is Sunday", "Heute ist Montag"),
    "epoch": ("now=17961234{day}", "now=1796234{n}00.25"),
    "compact": ("20261129T08{day}00Z", "20261201T090{n}00Z"),
    "counter": (
        "Context used: 4{n} % ({day},123 of 200k tokens)",
        "Context used: 51 % (99,000 of 200k tokens)",
    ),
    "turn": ("Turn {n} of at most {day}", "Turn 12 of at most 20"),
    "git": (
        "On branch main\nYour branch is up to date with 'origin/main'.\nnothing to commit, tree clean",
        "On branch fix/clock\nChanges not staged for commit:\n M src/reader/lines.py\n?? notes.md",
    ),
    "git log": ("a1b2c3d{n} Read lines lazily\nf00d{day}e Add a test", "99aa88bb Mend the clock, at last"),
    "load": ("cpu {n}%, {day} GB free", "cpu 97%, 1 GB free"),
    "request id": ("request 0f8e{day}-77{n}", "request aa11-2"),
}


@pytest.mark.parametrize("place", ["head", "tail", "line"])
@pytest.mark.parametrize("opening", ["Hi", QUESTION])
@pytest.mark.parametrize("clock", CLOCKS)
def test_front_matter_that_changes_each_turn(parse: Parse, clock: str, opening: str, place: str) -> None:
    """Clocks in any language and form, counters and git status at either end: one conversation, one key."""
    keys = set()
    for turns in range(2, 8):
        text = CLOCKS[clock][turns % 2].format(n=turns, day=20 + turns)
        system = {
            "head": f"{text}\n{STABLE}",
            "tail": f"{STABLE}\n{text}",
            "line": f"{STABLE}\n\n<env>\n{text}\n</env>\n",
        }[place]
        keys.add(parse(chat(*talk(opening, turns), system=system)).session_key)
    assert len(keys) == 1
    assert None not in keys


def test_a_system_prompt_that_is_nothing_but_a_clock(parse: Parse) -> None:
    """The first user turn tells."""
    keys = {
        parse(chat(*talk(QUESTION, turns), system=f"It is 08:1{turns} on 2026-11-29.")).session_key
        for turns in range(1, 8)
    }
    assert len(keys) == 1


def test_system_prompts_still_tell_agents_apart(parse: Parse) -> None:
    """The same question to ten agents: ten keys, in any script, however short the prompt."""
    prompts = [
        "You route questions to the right team of the workshop",
        "You grade answers for the people of the workshop",
        "s",
        "t",
        "你是一个乐于助人的助手，请用简短的句子回答",
        "你是一个严格的评审，请指出答案里的错误",
        f"{STABLE} Speak like a sailor when you explain things to people who asked for it, not to others.",
    ]
    assert len({parse(chat(user(QUESTION), system=prompt)).session_key for prompt in prompts}) == len(prompts)


def test_a_list_of_tools_that_grows_at_its_end(parse: Parse) -> None:
    """goose loads extensions while it runs."""
    tools = [
        {
            "type": "function",
            "function": {"name": f"tool_{n}", "description": f"Do the thing of kind {n}. " * 7},
        }
        for n in range(12)
    ]
    keys = {
        parse(chat(*talk(QUESTION, turns), system=STABLE, tools=tools[: 5 + turns])).session_key
        for turns in range(1, 7)
    }
    assert len(keys) == 1


def test_the_key_is_the_same_on_every_replica(parse: Parse) -> None:
    """Nothing but the request decides: a fresh parser that meets turn seven first agrees."""

    bodies = [chat(*talk("Hi", turns), system=f"08:1{turns}\n{STABLE}") for turns in range(2, 9)]
    keys = {parse(body).session_key for body in bodies}
    for body in reversed(bodies):
        fresh = FactsParser(KeySettings(), b"test secret")
        keys.add(fresh.parse(Api.CHAT, [], json.dumps(body, ensure_ascii=False).encode()).session_key)
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (STABLE, "Answer in short sentences and name your sources where you have any"),
        ("one two three four. five", "one two three four"),
        ("averyveryverylongword\nfour words are enough", "four words are enough"),
        ("onlyoneword", "onlyoneword"),
        ("8:15", ""),
        ("", ""),
        ("Today is Tuesday, and that is all there is to say here\nBe nice", "Be nice"),
    ],
)
def test_which_sentence_stands_for_a_prompt(text: str, sentence: str) -> None:
    assert stable_sentence([text], b"")[0].decode() == sentence
