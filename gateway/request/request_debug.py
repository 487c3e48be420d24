"""One request told in full, where an operator asks for it: `x-homing-log-level: debug` with the admin token.

The access line says what was decided; this line says why: every candidate with its price, what the session
table held, what was tried. It is written whatever the log level is, so that a question about one client does
not need the whole gateway at debug. Without the token in `x-homing-admin-token` the header is ignored without
a word. Neither header reaches a backend. Prompts, keys and raw session ids are not in the line either.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gateway.request.operator_tokens import Tokens
from gateway.request.turn import Turn
from gateway.values import Binding, Decision

LEVEL_HEADER = "x-homing-log-level"
TOKEN_HEADER = "x-homing-admin-token"  # noqa: S105 - the name of a header


def is_asked_for(headers: Mapping[str, str], tokens: Tokens) -> bool:
    """Whether this request is to be told in full. Either role may ask: it changes nothing."""
    if headers.get(LEVEL_HEADER, "").lower() != "debug":
        return False
    return tokens.role_of(f"Bearer {headers.get(TOKEN_HEADER, '')}") is not None


def debug_line(turn: Turn) -> dict[str, Any]:
    """The line, as data."""
    facts = turn.facts
    return {
        "time": int(time.time() * 1000) / 1000,
        "level": "debug",
        "event": "request_debug",
        "request_id": turn.request_id,
        "session": facts.session_key,
        "ignored_id": facts.ignored_id.reason if facts.ignored_id is not None else None,
        "prompt_group": facts.prompt_key,
        "is_follow_up": facts.is_follow_up,
        "is_store_away": turn.placement.is_store_away,
        "tried": sorted(turn.placement.tried),
        "races": turn.placement.num_races,
        "waited_s": turn.placement.waited_s,
        "binding": _binding(turn.placement.binding),
        "decision": _decision(turn.placement.decision),
        "error": turn.outcome.error.code if turn.outcome.error is not None else None,
    }


def _binding(binding: Binding | None) -> dict[str, Any] | None:
    if binding is None:
        return None
    return {
        "backend": binding.backend_id,
        "epoch": binding.epoch,
        "version": binding.version,
        "turns": binding.num_turns,
        "context_tokens": binding.context_tokens,
    }


def _decision(decision: Decision | None) -> dict[str, Any] | None:
    if decision is None:
        return None
    return {
        "backend": decision.backend_id,
        "reason": decision.reason,
        "policy": decision.policy,
        "prompt_tokens": decision.prompt_tokens,
        "candidates": [
            {
                "backend": candidate.backend_id,
                "price": candidate.price,
                "reason": candidate.reason,
                "expected_cached_tokens": candidate.expected_cached_tokens,
                "wait_s": candidate.wait_s,
                "prefill_s": candidate.prefill_s,
            }
            for candidate in decision.ranked
        ],
    }
