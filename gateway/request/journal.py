"""What this replica remembers of sessions and prompt groups, for people who ask why.

Fed once per request at step 7, a good microsecond; bounded in everything; lost at a restart, and blind to
the turns that other replicas serve. Decides nothing: routing has books of its own. It holds keys (hashes),
numbers and names of backends; no prompt text and no raw ids.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

from gateway.request.ignored_ids import IgnoredIds
from gateway.request.turn import Turn
from gateway.values import Affinity, AttemptOutcome, BackendId, Decision, KeySource, PromptKey, SessionKey

MAX_TURNS_KEPT = 16
MAX_MOVES_KEPT = 16
MAX_GROUPS = 2000
MAX_RECENT_MOVES = 200
MAX_TTFT_SAMPLES = 256
LAST_TURN_BUCKET = 20  # turns from here on are counted together
HEAT_HALF_LIFE_S = 600.0
HEAT_STEP_S = 10.0  # how often a busy group's heat is let cool: not at every request

TurnRow = tuple[float, BackendId, Affinity, str, int | None, int | None, float | None, int, AttemptOutcome]
"""When, where, affinity, reason, prompt tokens, cached tokens, time to first token, status, outcome."""

Tokens = tuple[int | None, int | None]
"""Prompt tokens, and how many of them the engine found in its cache; None: it did not say."""

MoveRow = tuple[float, SessionKey, BackendId | None, BackendId, str]
"""When, whose, from where, to where, why."""


class Story:
    """One session as seen by this replica."""

    __slots__ = (
        "backend_id",
        "cached_tokens",
        "first_seen_s",
        "key",
        "key_source",
        "last_seen_s",
        "model",
        "moves",
        "num_turns",
        "prompt_key",
        "prompt_tokens",
        "turns",
    )

    def __init__(self, key: SessionKey, turn: Turn, backend_id: BackendId, now_s: float) -> None:
        self.key = key
        self.key_source: KeySource = turn.facts.key_source
        self.model = turn.facts.model
        self.prompt_key = turn.facts.prompt_key
        self.backend_id = backend_id
        self.first_seen_s = self.last_seen_s = now_s
        self.num_turns = 0
        self.prompt_tokens = self.cached_tokens = 0  # of turns whose engine told both
        self.turns: deque[TurnRow] = deque(maxlen=MAX_TURNS_KEPT)
        self.moves: deque[MoveRow] = deque(maxlen=MAX_MOVES_KEPT)


class Group:
    """One prompt group: requests whose system prompt and tools are alike."""

    __slots__ = (
        "cached_tokens",
        "heat",
        "heat_as_of_s",
        "key",
        "last_seen_s",
        "model",
        "num_requests",
        "prefix",
        "prompt_tokens",
    )

    def __init__(self, key: PromptKey, turn: Turn, now_s: float) -> None:
        self.key = key
        self.model = turn.facts.model
        self.prefix = turn.facts.prefix[:1]  # the system prompt and tools, as one message
        self.num_requests = self.prompt_tokens = self.cached_tokens = 0
        self.heat = 0.0
        self.heat_as_of_s = self.last_seen_s = now_s

    def heat_at(self, now_s: float) -> float:
        """Requests of late: each counts for half after ten minutes."""
        return self.heat * math.exp2((self.heat_as_of_s - now_s) / HEAT_HALF_LIFE_S)


class TurnBucket:
    """All turns with one number in their session."""

    __slots__ = ("cached_tokens", "num_turns", "prompt_tokens", "ttft_cold_s", "ttft_hit_s", "ttft_unknown_s")

    def __init__(self) -> None:
        self.num_turns = self.prompt_tokens = self.cached_tokens = 0
        self.ttft_hit_s: deque[float] = deque(maxlen=MAX_TTFT_SAMPLES)
        self.ttft_cold_s: deque[float] = deque(maxlen=MAX_TTFT_SAMPLES)
        self.ttft_unknown_s: deque[float] = deque(maxlen=MAX_TTFT_SAMPLES)


class Journal:
    """Sessions by last use, prompt groups, recent moves, and turns by their number."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._stories: OrderedDict[SessionKey, Story] = OrderedDict()
        self._groups: OrderedDict[PromptKey, Group] = OrderedDict()
        self.recent_moves: deque[MoveRow] = deque(maxlen=MAX_RECENT_MOVES)
        self.ignored_ids = IgnoredIds(max_sessions)
        self.by_turn = [TurnBucket() for _ in range(LAST_TURN_BUCKET)]

    # -- writing

    def note(self, turn: Turn, now_s: float) -> None:
        """Take in one finished request. Changes the journal.

        Requests that cannot bind, such as counts of tokens and titles, are no turns of their session.
        """
        decision, facts, observer = turn.placement.decision, turn.facts, turn.outcome.observer
        if decision is None:
            return
        usage = observer.usage if observer is not None else None
        prompt_tokens = cached_tokens = None
        if usage is not None and usage.prompt_tokens is not None:
            prompt_tokens, cached_tokens = usage.prompt_tokens, usage.cached_tokens
            if cached_tokens is not None and cached_tokens > prompt_tokens:
                cached_tokens = prompt_tokens
        if facts.prompt_key is not None:
            self._note_group(facts.prompt_key, turn, now_s, (prompt_tokens, cached_tokens))
        if facts.ignored_id is not None:
            self.ignored_ids.note(facts.ignored_id, facts.session_key, now_s)
        if facts.session_key is not None and facts.sets_binding:
            self._note_session(facts.session_key, turn, decision, now_s, (prompt_tokens, cached_tokens))

    def _note_session(
        self, key: SessionKey, turn: Turn, decision: Decision, now_s: float, tokens: Tokens
    ) -> None:
        prompt_tokens, cached_tokens = tokens
        ttft_s = None if turn.outcome.first_token_s is None else turn.outcome.first_token_s - turn.started_s
        if turn.placement.binding is not None:
            self._note_number(turn.placement.binding.num_turns, tokens, ttft_s)
        backend_id = decision.backend_id
        story = self._stories.get(key)
        if story is None:
            story = self._open_story(key, turn, backend_id, now_s)
        else:
            self._stories.move_to_end(key)
        if backend_id != story.backend_id and turn.placement.affinity is not Affinity.UNPINNED:
            before = turn.placement.moved_from or story.backend_id
            # no reason of this turn: the home was changed elsewhere, by another replica or a hand-over
            self._add_move(story, before, backend_id, turn.placement.moved_reason or "rebound", now_s)
        story.last_seen_s = now_s
        story.num_turns += 1
        if prompt_tokens is not None and cached_tokens is not None:
            story.prompt_tokens += prompt_tokens
            story.cached_tokens += cached_tokens
        reason = turn.placement.moved_reason or decision.reason
        story.turns.append(
            (
                now_s,
                backend_id,
                turn.placement.affinity,
                reason,
                prompt_tokens,
                cached_tokens,
                ttft_s,
                turn.outcome.status,
                turn.outcome.result,
            )
        )

    def note_move(
        self, key: SessionKey, before: BackendId, after: BackendId, reason: str, now_s: float
    ) -> None:
        """Take in a move that no request made, as by an operator. Changes the journal."""
        story = self._stories.get(key)
        if story is not None:
            self._add_move(story, before, after, reason, now_s)
        else:
            self.recent_moves.append((now_s, key, before, after, reason))

    def _add_move(
        self, story: Story, before: BackendId | None, after: BackendId, reason: str, now_s: float
    ) -> None:
        row = (now_s, story.key, before, after, reason)
        story.moves.append(row)
        story.backend_id = after
        self.recent_moves.append(row)

    def _open_story(self, key: SessionKey, turn: Turn, backend_id: BackendId, now_s: float) -> Story:
        story = self._stories[key] = Story(key, turn, turn.placement.moved_from or backend_id, now_s)
        if len(self._stories) > self._max_sessions:
            self._stories.popitem(last=False)
        return story

    def _note_group(self, key: PromptKey, turn: Turn, now_s: float, tokens: Tokens) -> None:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key, turn, now_s)
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(key)
        if now_s - group.heat_as_of_s > HEAT_STEP_S:
            group.heat, group.heat_as_of_s = group.heat_at(now_s), now_s
        group.heat += 1.0
        group.last_seen_s = now_s
        group.num_requests += 1
        prompt_tokens, cached_tokens = tokens
        if prompt_tokens is not None and cached_tokens is not None:
            group.prompt_tokens += prompt_tokens
            group.cached_tokens += cached_tokens

    def _note_number(self, num_before: int, tokens: Tokens, ttft_s: float | None) -> None:
        bucket = self.by_turn[num_before if num_before < LAST_TURN_BUCKET else -1]
        bucket.num_turns += 1
        samples = bucket.ttft_unknown_s
        prompt_tokens, cached_tokens = tokens
        if prompt_tokens is not None and cached_tokens is not None:
            bucket.prompt_tokens += prompt_tokens
            bucket.cached_tokens += cached_tokens
            # half of the prompt: a shared system prompt alone does not make a hit of a cold history
            samples = bucket.ttft_hit_s if cached_tokens * 2 >= prompt_tokens else bucket.ttft_cold_s
        if ttft_s is not None:
            samples.append(ttft_s)

    # -- reading

    def __len__(self) -> int:
        return len(self._stories)

    def story(self, key: SessionKey) -> Story | None:
        return self._stories.get(key)

    def recent(self, limit: int) -> Iterator[Story]:
        """The sessions used last, newest first."""
        return islice(reversed(self._stories.values()), limit)

    def starting_with(self, prefix: str, limit: int) -> list[Story]:
        """Sessions whose key begins so, newest first. O(sessions)."""
        found = (story for story in reversed(self._stories.values()) if story.key.startswith(prefix))
        return list(islice(found, limit))

    def hottest(self, now_s: float, limit: int) -> list[Group]:
        """Prompt groups with most requests of late. O(groups)."""
        return sorted(self._groups.values(), key=lambda one: one.heat_at(now_s), reverse=True)[:limit]

    def group(self, key: PromptKey) -> Group | None:
        return self._groups.get(key)
