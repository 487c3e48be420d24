"""Small fleets and requests for the tests of routing."""

from __future__ import annotations

import hashlib

from gateway.replay.rivals.registry import ALL_POLICIES
from gateway.routing.router import Router
from gateway.routing.settings import RoutingSettings
from gateway.values import (
    Api,
    Backend,
    BackendId,
    BackendState,
    Binding,
    Decision,
    FleetView,
    KeySource,
    Message,
    PromptKey,
    RequestFacts,
    SessionKey,
)


def backend(name: str, **changes: object) -> Backend:
    values: dict[str, object] = {"base_url": f"http://{name}:8000", "state": BackendState.READY, "epoch": 1}
    return Backend(backend_id=BackendId(name), **(values | changes))  # type: ignore[arg-type] # loose test values


def fleet(*backends: Backend, generation: int = 1) -> FleetView:
    return FleetView(generation=generation, backends={b.backend_id: b for b in backends})


def names(count: int) -> list[str]:
    return [f"b{index}" for index in range(count)]


def ready_router(count: int, now_s: float = 1000.0, **options: object) -> Router:
    router = Router(RoutingSettings(**options), policies=ALL_POLICIES)  # type: ignore[arg-type] # loose test values
    router.observe_view(fleet(*(backend(name) for name in names(count))), now_s)
    return router


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def chain(*texts: str, size: int = 400) -> tuple[Message, ...]:
    """Messages whose hashes are chained, as the wire makes them."""
    messages, state = [], ""
    for text in texts:
        state = digest(state + "/" + text)
        messages.append(Message(chain_hash=int(state[:16], 16), num_bytes=size))
    return tuple(messages)


def request(
    session: str | None = None,
    *,
    prompt: str | None = None,
    texts: tuple[str, ...] = (),
    size: int = 400,
    **changes: object,
) -> RequestFacts:
    prefix = chain(
        *(((prompt,) if prompt else ()) + (texts or ((f"{session} says hello",) if session else ()))),
        size=size,
    )
    values: dict[str, object] = {
        "api": Api.CHAT,
        "session_key": None if session is None else SessionKey(digest(session)),
        "prompt_key": None if prompt is None else PromptKey(digest("prompt " + prompt)),
        "key_source": KeySource.HEADER if session else (KeySource.PROMPT_GROUP if prompt else KeySource.NONE),
        "prefix": prefix,
        "num_prompt_bytes": sum(message.num_bytes for message in prefix) or 100,
    }
    return RequestFacts(**(values | changes))  # type: ignore[arg-type] # loose test values


def bind(decision: Decision, epoch: int = 1, context_tokens: int = 200) -> Binding:
    return Binding(backend_id=decision.backend_id, epoch=epoch, context_tokens=context_tokens, num_turns=1)
