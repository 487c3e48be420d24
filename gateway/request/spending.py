"""How many tokens a request has cost its tenant, whether or not anybody reports it.

What the engine reports counts, within reason. Where it reports nothing, or the client has left before, the
answer that has passed is measured: events of a stream, bytes of a body, each at as many tokens as in answers
of that model that do report. So a client saves nothing by leaving early, or by not asking for usage. What is
known to have computed nothing costs nothing: refusals, failures before any content, counts of tokens.
"""

from __future__ import annotations

import math
from typing import Final

from gateway.limits.tenant_limiter import Charge
from gateway.request.answer_observer import AnswerObserver
from gateway.request.turn import Turn
from gateway.routing.calibration import TokenRatio
from gateway.values import Api, AttemptOutcome
from gateway.wire.usage import STORED_TOKENS, UNSEEN_TOKENS

# Of these a backend has given no content, and none that it may still compute is the client's doing.
_FREE: Final = frozenset(
    {
        AttemptOutcome.NOT_SENT.value,
        AttemptOutcome.REFUSED.value,
        AttemptOutcome.NO_ANSWER.value,
        AttemptOutcome.BACK_PRESSURE.value,
        AttemptOutcome.FAILED_BEFORE_CONTENT.value,
    }
)
# The answers of others (vectors, scores, sound) are no tokens.
_GENERATES: Final = frozenset(
    {
        Api.CHAT.value,
        Api.COMPLETIONS.value,
        Api.MESSAGES.value,
        Api.RESPONSES.value,
        Api.GENERATE.value,
    }
)
_MIN_EVENTS: Final = 8  # fewer are mostly openings and ends
_MIN_BODY_BYTES: Final = 1_024  # below that a body is mostly its frame
_LARGE_EVENT_BYTES: Final = 4_096  # one token with its 20 alternatives and their bytes has about half of it


class Spending:
    """One per gateway process. Learns from the answers of limited tenants that report."""

    def __init__(self) -> None:
        self._per_event = TokenRatio(1.0, highest=64.0, least=_MIN_EVENTS)
        self._per_byte = TokenRatio(0.25, highest=1.0, least=_MIN_BODY_BYTES)

    def settle(self, turn: Turn, charge: Charge) -> int:
        """Return the tokens that a request has cost which has ended. Changes what is known of its model."""
        outcome, observer = turn.outcome, turn.outcome.observer
        if outcome.result._value_ in _FREE or turn.route.is_count:
            return 0
        if observer is not None and observer.error_status is not None and not observer.has_first_token:
            return 0
        if observer is None:
            has_left = outcome.is_client_gone and not outcome.is_begun and outcome.sent_s is not None
            return _prompt_estimate(turn) if has_left else 0
        completion_tokens = self._completion(turn, observer)
        if turn.facts.is_about_object:
            # The prompt of a job in the background was charged when it was asked for.
            return completion_tokens if observer.is_background else 0
        return completion_tokens + _prompt(turn, observer, charge.limits.cached_token_rate)

    def _completion(self, turn: Turn, observer: AnswerObserver) -> int:
        if turn.api._value_ not in _GENERATES:
            return _reported(observer)
        reported = None if observer.usage is None else observer.usage.completion_tokens
        is_whole = turn.outcome.result is AttemptOutcome.COMPLETE
        if is_whole and reported is not None:
            self._learn(turn.facts.model, observer, reported)
            return reported
        if observer.is_background and not observer.is_stream:
            return reported or 0
        seen = self._seen(turn.facts.model, observer)
        return max(seen, reported or 0)  # Anthropic's streams report at their start, too

    def _seen(self, model: str | None, observer: AnswerObserver) -> int:
        num_events, num_bytes = observer.num_events, observer.num_bytes
        per_byte = self._per_byte.get(model)
        if not observer.is_stream:
            return int(num_bytes * per_byte)
        excess_bytes = num_bytes - num_events * _LARGE_EVENT_BYTES
        return int(max(num_events * self._per_event.get(model), excess_bytes * per_byte))

    def _learn(self, model: str | None, observer: AnswerObserver, num_tokens: int) -> None:
        if observer.is_stream:
            self._per_event.observe(model, observer.num_events, num_tokens)
        else:
            self._per_byte.observe(model, observer.num_bytes, num_tokens)


def max_prompt_tokens(turn: Turn) -> int:
    """Return how many tokens the prompt of a turn may have at most, by what was sent of it."""
    unseen = UNSEEN_TOKENS if turn.facts.answer_key is None else STORED_TOKENS
    return max(len(turn.body), turn.facts.num_prompt_bytes) + unseen


def _prompt(turn: Turn, observer: AnswerObserver, cached_token_rate: float) -> int:
    usage = observer.usage
    if usage is None or usage.prompt_tokens is None:
        return _prompt_estimate(turn)
    saved = (usage.cached_tokens or 0) * (1.0 - cached_token_rate)
    return math.ceil(usage.prompt_tokens - saved)


def _prompt_estimate(turn: Turn) -> int:
    decision = turn.placement.decision
    return 0 if decision is None else decision.prompt_tokens


def _reported(observer: AnswerObserver) -> int:
    return 0 if observer.usage is None else observer.usage.completion_tokens or 0
