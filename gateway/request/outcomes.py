"""What became of a request, from everything that is known of it: the one place that decides it.

Health, metrics, the access line and the journal read the result; none of them looks at the status alone.
"""

from __future__ import annotations

from typing import Final

from gateway.errors import (
    GatewayError,
    UpstreamConnectFailed,
    UpstreamError,
    UpstreamFailed,
    UpstreamTruncated,
    UpstreamUnavailable,
)
from gateway.request.turn import TurnOutcome
from gateway.values import AttemptOutcome

_BUSY: Final = frozenset({429, 503, 529})
_CUT_SHORT: Final = frozenset({"abort", "error"})
"""Finish reasons of an engine that gave up."""


def outcome_of(outcome: TurnOutcome) -> AttemptOutcome:
    """Judge a turn that has ended and whose observer has finished."""
    if outcome.is_client_gone:
        return AttemptOutcome.ABORTED_BY_CLIENT
    if outcome.error is not None:
        return outcome_of_error(outcome.error, is_begun=outcome.is_begun)
    if outcome.status >= 400:
        return outcome_of_answer(outcome.status)
    observer = outcome.observer
    if observer is None:
        return AttemptOutcome.COMPLETE
    if observer.error_status is not None and not observer.has_first_token:
        return outcome_of_answer(observer.error_status)
    if is_backends_fault(observer.error_status) or observer.finish_reason in _CUT_SHORT:
        return AttemptOutcome.FAILED_IN_STREAM
    return AttemptOutcome.COMPLETE


def outcome_of_answer(status: int) -> AttemptOutcome:
    """Judge an answer by its status, or by the one that an error inside it stands for."""
    if status in _BUSY:
        return AttemptOutcome.BACK_PRESSURE
    return AttemptOutcome.FAILED_BEFORE_CONTENT if status >= 500 else AttemptOutcome.COMPLETE


def is_backends_fault(error_status: int | None) -> bool:
    """Whether an error behind some content is the backend's fault and not the request's."""
    return error_status is not None and (error_status >= 500 or error_status in _BUSY)


def outcome_of_error(error: GatewayError, *, is_begun: bool) -> AttemptOutcome:
    """Judge a failed attempt. `is_begun`: the client has something of its answer."""
    if is_begun:
        return AttemptOutcome.FAILED_IN_STREAM
    if isinstance(error, UpstreamConnectFailed):
        return AttemptOutcome.REFUSED
    if isinstance(error, (UpstreamFailed, UpstreamTruncated)):
        return AttemptOutcome.FAILED_BEFORE_CONTENT
    if isinstance(error, UpstreamUnavailable):
        return AttemptOutcome.BACK_PRESSURE
    return AttemptOutcome.NO_ANSWER if isinstance(error, UpstreamError) else AttemptOutcome.NOT_SENT
