"""Step 6: when an attempt has failed, whether another backend is to try, and what is undone for it."""

from __future__ import annotations

from typing import Final

from gateway.errors import UpstreamConnectFailed, UpstreamError, UpstreamReset, UpstreamUnavailable
from gateway.request.forward import Forwarder
from gateway.request.held_answers import HeldAnswers
from gateway.request.parts import ProxyParts
from gateway.request.placing import PLACE_STEP, Placer
from gateway.request.turn import Turn
from gateway.routing.failover import may_try_another

MAX_ASKED: Final = 31
"""Backends that may say 404 before one more is asked for an id that is not known."""


class FailOver:
    """Moves turns to other backends under one configuration."""

    def __init__(self, parts: ProxyParts, forwarder: Forwarder, placer: Placer, held: HeldAnswers) -> None:
        self._settings, self._retries, self._metrics = parts.config.failover, parts.retries, parts.metrics
        self._fleet = parts.fleet
        self._router, self._forwarder, self._placer, self._held = parts.router, forwarder, placer, held

    def has_alternative(self, turn: Turn) -> bool:
        """Whether another backend could take this request now."""
        placement = turn.placement
        if placement.num_attempts >= self._settings.max_attempts or turn.backend_id is None:
            return False
        if placement.makers is not None:
            gone = placement.tried | placement.asked | {turn.backend_id}
            return any(maker not in gone for maker in placement.makers)
        return self._router.could_take(turn.facts, placement.tried | {turn.backend_id})

    def take_retry(self, turn: Turn, error: UpstreamError) -> bool:
        """Whether another backend is to try. Takes it from the budget."""
        num_attempts = turn.placement.num_attempts
        return (
            may_try_another(error, num_attempts=num_attempts, settings=self._settings)
            and self.has_alternative(turn)
            and self._retries.withdraw()
        )

    def give_up(self, turn: Turn, error: UpstreamError) -> None:
        """Leave this backend for another one: back to step 3."""
        assert turn.backend_id is not None
        self.end_attempt(turn, error)
        self._metrics.retries[error.code] += 1.0
        is_gone = isinstance(error, UpstreamConnectFailed)
        turn.placement.tried |= self._fleet.view.siblings(turn.backend_id) if is_gone else {turn.backend_id}
        turn.step = PLACE_STEP

    def fail_attempt(self, turn: Turn, error: UpstreamError) -> None:
        """Give the attempt up. Raises `error` when no other backend is to try."""
        if not self.take_retry(turn, error):
            self.end_attempt(turn, error)
            raise error
        self.give_up(turn, error)

    def end_attempt(self, turn: Turn, error: UpstreamError) -> None:
        """Forget what came of it. Nothing of it has reached the client."""
        attempt, turn.attempt = turn.attempt, None
        if attempt is not None:
            self._held.discard(attempt)
        turn.outcome.observer = turn.outcome.first_token_s = None
        self._forwarder.note_failure(turn, error)
        self._placer.release(turn)
        if turn.trace is not None:
            turn.trace.fail_attempt(error)

    def ask_next(self, turn: Turn) -> bool:
        """Whether another backend is asked for what this one does not know. Nobody knows who has it."""
        placement, backend_id = turn.placement, turn.backend_id
        if not placement.is_asking or backend_id is None or len(placement.asked) >= MAX_ASKED:
            return False
        asked, view = placement.asked | {backend_id}, self._fleet.view
        others = sorted(other.backend_id for other in view.backends.values() if other.state.is_routable)
        makers = tuple(other for other in others if other not in asked | placement.tried)
        if not makers:
            return False
        placement.asked, placement.makers = asked, makers
        placement.num_attempts -= 1  # it has answered: that is no failure
        attempt, turn.attempt = turn.attempt, None
        if attempt is not None:
            self._held.discard(attempt)
            attempt.abort()
        turn.outcome.observer = turn.outcome.first_token_s = None
        self._placer.release(turn)
        if turn.trace is not None:
            turn.trace.fail_attempt(UpstreamUnavailable(f"backend {backend_id} has nothing of this id"))
        turn.step = PLACE_STEP
        return True

    def is_only_stale(self, turn: Turn, error: UpstreamError) -> bool:
        """Whether the same backend should get the request again, on a fresh connection.

        A backend that closes an idle connection does it in good order. One that resets it may be failing, so
        it is asked again only where nobody else can take the request.
        """
        if not (isinstance(error, UpstreamReset) and error.is_stale):
            return False
        return not (error.was_reset and self.has_alternative(turn))
