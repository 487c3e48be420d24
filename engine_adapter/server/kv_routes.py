"""`/v1/kv/…`: shows and changes the KV cache, for operators.

Decides how a prefix is named over HTTP: by messages (rendered like a chat, without the opening of the
answer), by text, or by token ids. A pin reports how many tokens were requested, how many are held now, and
whether the rest is still being computed. `explain` reveals what others have sent, so these routes belong
behind the gateway's admin token; the worker listens on loopback by default.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec
from aiohttp import web

from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.pins import Pin, PinRefused, PinSpec
from engine_adapter.engine.kv.radix_view import RadixNode, radix_view
from engine_adapter.server.chat import check_messages, render_prompt
from engine_adapter.server.errors import ApiError, bad_request, not_found
from engine_adapter.server.event_stream import json_response
from engine_adapter.server.protocol import ChatMessage
from engine_adapter.server.request_body import read_body
from engine_adapter.server.serving import ServingContext, context_of


class PrefixFields(msgspec.Struct, kw_only=True):
    """One of three ways to name a prefix, and its tenant's salt."""

    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    tokens: list[int] | None = None
    cache_salt: str | None = None


class PinRequest(PrefixFields, kw_only=True):
    name: str = ""
    owner: str = ""
    priority: int = 0
    ttl_s: float | None = None


async def create_pin(request: web.Request) -> web.Response:
    """`POST /v1/kv/pins`: 201 with what is held already; 409 if the pin is refused."""
    context = context_of(request)
    body = await read_body(request, PinRequest)
    if body.ttl_s is not None and not 0 < body.ttl_s < 10**9:
        raise bad_request("ttl_s must be a positive number of seconds", param="ttl_s", code="invalid_value")
    spec = PinSpec(
        token_ids=tuple(_prefix_tokens(context, body, opens_answer=False)),
        name=body.name[:200],
        owner=body.owner[:200],
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        expires_at_wall_s=time.time() + body.ttl_s if body.ttl_s is not None else None,
    )

    def pin(engine: LLMEngine) -> dict[str, object]:
        return _pin_document(engine, engine.pins.pin(spec))

    try:
        document = await context.engine.call(pin)
    except PinRefused as error:
        raise ApiError(409, str(error), code="pin_refused") from error
    return json_response(document, 201)


async def list_pins(request: web.Request) -> web.Response:
    """`GET /v1/kv/pins`: every pin and the budget."""
    context = context_of(request)

    def read(engine: LLMEngine) -> dict[str, object]:
        table = engine.pins.table
        return {
            "pins": [_pin_document(engine, pin) for pin in table.pins],
            "budget_blocks": table.budget_blocks,
            "pinned_blocks": engine.stats().num_blocks_pinned,
            "block_size": engine.config.block_size,
            "is_restored": engine.pins.is_restored,
            "manifest_error": engine.pins.manifest_error,
        }

    return json_response(await context.engine.call(read))


async def get_pin(request: web.Request) -> web.Response:
    """`GET /v1/kv/pins/{id}`."""
    pin_id = request.match_info["pin_id"]

    def read(engine: LLMEngine) -> dict[str, object] | None:
        pin = engine.pins.table.get(pin_id)
        return None if pin is None else _pin_document(engine, pin)

    document = await context_of(request).engine.call(read)
    if document is None:
        raise not_found("no such pin", param="pin_id")
    return json_response(document)


async def delete_pin(request: web.Request) -> web.Response:
    """`DELETE /v1/kv/pins/{id}`."""
    pin_id = request.match_info["pin_id"]
    if not await context_of(request).engine.call(lambda engine: engine.pins.unpin(pin_id)):
        raise not_found("no such pin", param="pin_id")
    return json_response({"id": pin_id, "deleted": True})


async def stats(request: web.Request) -> web.Response:
    """`GET /v1/kv/stats`: blocks by state, capacity in tokens, hits."""
    context = context_of(request)
    now = context.engine.latest_stats
    document: dict[str, object] = dataclasses.asdict(now)
    events = context.kv_events
    document["kv_events"] = events and {
        "endpoint": events.endpoint,
        "replay_endpoint": events.replay_endpoint,
        "epoch": events.epoch,
    }
    document["capacity_tokens"] = now.num_blocks_total * now.block_size
    return json_response(document)


async def explain(request: web.Request) -> web.Response:
    """`POST /v1/kv/explain`: how much of a prompt is cached, and why not more."""
    context = context_of(request)
    body = await read_body(request, PrefixFields)
    token_ids = _prefix_tokens(context, body, opens_answer=True)
    explanation = await context.engine.call(lambda engine: engine.explain(token_ids, body.cache_salt or ""))
    return json_response({**dataclasses.asdict(explanation), "cause": explanation.cause.value})


async def inventory(request: web.Request) -> web.Response:
    """`GET /v1/kv/inventory`: tokens of every tag, on the device and, after those, in the tiers."""

    def read(engine: LLMEngine) -> dict[str, object]:
        return {
            "resident_tokens": engine.inventory.report(),
            "tier_tokens": engine.inventory.report_below(engine.tiers.count_following),
        }

    return json_response(await context_of(request).engine.call(read))


async def tree(request: web.Request) -> web.Response:
    """`GET /v1/kv/tree`: the prefix cache as a tree of prefixes, bounded."""

    def read(engine: LLMEngine) -> list[RadixNode]:
        return radix_view(engine.blocks.prefix_cache, engine.blocks.pool)

    return json_response({"roots": await context_of(request).engine.call(read)})


async def clear(request: web.Request) -> web.Response:
    """`POST /v1/kv/clear`: forget everything that no request and no pin holds."""
    num_blocks = await context_of(request).engine.call(LLMEngine.clear_cache)
    return json_response({"cleared_blocks": num_blocks})


def _prefix_tokens(context: ServingContext, body: PrefixFields, *, opens_answer: bool) -> list[int]:
    given = [name for name in ("messages", "prompt", "tokens") if getattr(body, name) is not None]
    if len(given) != 1:
        raise bad_request("give exactly one of messages, prompt, tokens", param=(given or ["messages"])[0])
    if body.messages is not None:
        check_messages(body.messages)
        return render_prompt(context, body.messages, tools=body.tools, add_generation_prompt=opens_answer)
    if body.prompt is not None:
        return context.tokenizer.encode(body.prompt)
    token_ids = body.tokens or []
    if any(not 0 <= token < context.limits.vocab_size for token in token_ids):
        last = context.limits.vocab_size - 1
        raise bad_request(f"tokens must be between 0 and {last}", param="tokens", code="invalid_value")
    return token_ids


def _pin_document(engine: LLMEngine, pin: Pin) -> dict[str, object]:
    size = engine.config.block_size
    return {
        "id": pin.pin_id,
        "name": pin.spec.name,
        "owner": pin.spec.owner,
        "priority": pin.spec.priority,
        "state": pin.state.value,
        "num_tokens": len(pin.spec.token_ids),
        "pinned_tokens": len(pin.block_ids) * size,
        "granted_tokens": pin.num_allowed_blocks * size,
        "expires_at": pin.spec.expires_at_wall_s,
    }
