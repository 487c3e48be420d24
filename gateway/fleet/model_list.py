"""What backends tell of their models: names, the length of their context, what an adapter is made of.

Engines answer `/v1/models` with cards of one shape and different fields. What is missing or odd is unknown.
Invariant: pure, and total. Knows no backends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

_MAX_TOKENS: Final = 1 << 40


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One model of one backend, or of all."""

    id: str
    created: int = 0
    root: str | None = None
    parent: str | None = None  # what an adapter adapts
    context_tokens: int | None = None  # prompt and answer together; None: not told


class _Wire(msgspec.Struct, gc=False):
    id: str
    created: Any = None
    root: Any = None
    parent: Any = None
    max_model_len: Any = None  # vLLM, SGLang, our worker
    meta: Any = None  # llama.cpp: n_ctx


class _WireList(msgspec.Struct, gc=False):
    data: list[_Wire] = []


_decode: Final = msgspec.json.Decoder(_WireList).decode


def read_models(body: bytes) -> list[ModelCard] | None:
    """Return the cards of a `/v1/models` answer, None if it is none."""
    try:
        listed = _decode(body).data
    except (msgspec.DecodeError, RecursionError):
        return None
    return [_card(wire) for wire in listed]


def merge(cards: Iterable[ModelCard]) -> dict[str, ModelCard]:
    """Return one card for each model. Of several lengths the least is true of all."""
    merged: dict[str, ModelCard] = {}
    for card in cards:
        known = merged.get(card.id, card)
        lengths = [one.context_tokens for one in (known, card) if one.context_tokens is not None]
        merged[card.id] = ModelCard(
            id=card.id,
            created=known.created or card.created,
            root=known.root or card.root,
            parent=known.parent or card.parent,
            context_tokens=min(lengths, default=None),
        )
    return merged


def _card(wire: _Wire) -> ModelCard:
    length = _count(wire.max_model_len)
    if length is None and isinstance(wire.meta, dict):
        length = _count(wire.meta.get("n_ctx"))
    return ModelCard(
        id=wire.id,
        created=_count(wire.created) or 0,
        root=_name(wire.root),
        parent=_name(wire.parent),
        context_tokens=length,
    )


def _count(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 < value <= _MAX_TOKENS else None


def _name(value: Any) -> str | None:
    return value[:512] if isinstance(value, str) and value else None
