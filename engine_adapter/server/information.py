"""Routes that describe the worker: models, health, version, metrics, tokens.

Decides what "healthy" means. `/live`: the process responds. `/health`: the engine runs, also while draining
(as vLLM's route of that name). `/ready`: new requests are accepted; the body says what is missing. `/metrics`
responds in every phase.
"""

from __future__ import annotations

import importlib.metadata

from aiohttp import web

from engine_adapter.server.chat import check_messages, render_prompt
from engine_adapter.server.errors import ApiError, bad_request, model_not_found
from engine_adapter.server.event_stream import json_response
from engine_adapter.server.protocol import DetokenizeRequest, TokenizeRequest
from engine_adapter.server.request_body import read_body
from engine_adapter.server.serving import SERVER_STATE, Phase, ServingContext, context_of

MAX_DETOKENIZE_TOKENS = 1_000_000


async def models(request: web.Request) -> web.Response:
    """`GET /v1/models`."""
    context = context_of(request)
    return json_response({"object": "list", "data": [_card(context, name) for name in context.model_names]})


async def model(request: web.Request) -> web.Response:
    """`GET /v1/models/{id}`; ids may contain slashes."""
    context = context_of(request)
    name = request.match_info["model"]
    if name not in context.model_names:
        raise model_not_found(name, context.model_name)
    return json_response(_card(context, name))


def _card(context: ServingContext, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": context.created_wall_s,
        "owned_by": "homing",
        "root": context.model_name,
        "max_model_len": context.limits.context_tokens,
    }


async def live(request: web.Request) -> web.Response:
    """`GET /live`: the process responds."""
    return json_response({"status": "ok", "phase": request.app[SERVER_STATE].phase.value})


async def health(request: web.Request) -> web.Response:
    """`GET /health`: 200 while the engine runs, draining included."""
    state = request.app[SERVER_STATE]
    is_healthy = state.phase in (Phase.READY, Phase.DRAINING)
    return json_response({"status": state.phase.value}, 200 if is_healthy else 503)


async def ready(request: web.Request) -> web.Response:
    """`GET /ready`: 200 while new requests are accepted."""
    state = request.app[SERVER_STATE]
    document = {
        "ready": state.phase is Phase.READY,
        "phase": state.phase.value,
        "detail": state.detail,
        "weights_loaded": state.context is not None,
        "pins_restored": state.phase in (Phase.READY, Phase.DRAINING),
        "requests_in_flight": state.num_in_flight,
    }
    return json_response(document, 200 if state.phase is Phase.READY else 503)


async def version(request: web.Request) -> web.Response:
    """`GET /version`."""
    del request
    try:
        installed = importlib.metadata.version("homing")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        installed = "0+source"
    return json_response({"version": installed, "engine": "homing-torch"})


async def metrics(request: web.Request) -> web.Response:
    """`GET /metrics`; empty until the model is loaded."""
    context = request.app[SERVER_STATE].context
    page = context.metrics.page() if context is not None else b""
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=page, headers=headers)


async def tokenize(request: web.Request) -> web.Response:
    """`POST /tokenize`: for a text, or for messages as the template renders them."""
    context = context_of(request)
    body = await read_body(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", param="prompt")
    if body.model is not None:
        context.check_model(body.model)
    if body.messages is not None:
        check_messages(body.messages)
        should_prompt = body.add_generation_prompt is not False
        ids = render_prompt(context, body.messages, tools=body.tools, add_generation_prompt=should_prompt)
    else:
        ids = context.tokenizer.encode(
            body.prompt or "", add_special_tokens=body.add_special_tokens is not False
        )
    document: dict[str, object] = {
        "count": len(ids),
        "max_model_len": context.limits.context_tokens,
        "tokens": ids,
    }
    if body.return_token_strs:
        document["token_strs"] = [context.tokenizer.token_text(token_id) for token_id in ids]
    return json_response(document)


async def detokenize(request: web.Request) -> web.Response:
    """`POST /detokenize`."""
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest)
    if body.model is not None:
        context.check_model(body.model)
    if len(body.tokens) > MAX_DETOKENIZE_TOKENS:
        raise ApiError(
            413, f"at most {MAX_DETOKENIZE_TOKENS} tokens", code="request_too_large", param="tokens"
        )
    if any(not 0 <= token < context.limits.vocab_size for token in body.tokens):
        last = context.limits.vocab_size - 1
        raise bad_request(f"tokens must be between 0 and {last}", param="tokens", code="invalid_value")
    return json_response({"prompt": context.tokenizer.decode(body.tokens, skip_special_tokens=False)})
