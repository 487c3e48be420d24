"""Request bodies and query parameters of the admin API, with their bounds. Unknown fields are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.values import Name

Weight = Annotated[float, Meta(ge=0, le=1000)]
BackendName = Name
SessionName = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
PinName = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=256)]
Limit = Annotated[int, Meta(ge=1, le=1000)]


class BackendPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Changes to a backend. Fields left out stay as they are."""

    weight: Weight | None = None
    labels: Annotated[dict[Text, Text], Meta(max_length=64)] | None = None


class DrainOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long bound sessions may take to leave. Default: `fleet.drain_deadline_s`."""

    deadline_s: Annotated[float, Meta(ge=0, le=604_800)] | None = None
    until_restart: bool = False
    """End the drain when the backend's process has restarted."""


class MoveOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The new home of a session."""

    backend: BackendName


class RouteQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request to decide without sending it."""

    path: Annotated[str, Meta(max_length=2048)] = "/v1/chat/completions"
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    tenant: Text = "default"


class AddedBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: BackendName
    weight: Weight = 1.0


class WhatIfQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A change of the fleet to evaluate without making it."""

    add: Annotated[list[AddedBackend], Meta(max_length=64)] = []
    remove: Annotated[list[BackendName], Meta(max_length=64)] = []
    reweight: Annotated[dict[BackendName, Weight], Meta(max_length=64)] = {}


class LogLevelOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"]


class PinOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prefix to keep resident, given as exactly one of messages, text and token ids."""

    backends: Annotated[list[BackendName], Meta(min_length=1, max_length=64)] | None = None
    """None: all backends whose engine supports pins."""
    name: PinName
    tenant: Text | None = None
    """The tenant whose requests use the prefix. Needed where engine caches are separated by tenant."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    tokens: list[int] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    ttl_s: Annotated[float, Meta(gt=0, lt=1e9)] | None = None


class SessionQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Find one session, or list them page by page."""

    session_id: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """The client's own id, as in `x-session-id`."""
    model: Text | None = None
    tenant: Text = "default"
    key: Annotated[str, Meta(pattern=r"^[0-9a-f]{4,32}$")] | None = None
    """A session key or a prefix of it, as in the access log. A prefix finds only sessions in this replica's
    memory."""
    backend: BackendName | None = None
    cursor: Annotated[str, Meta(max_length=512)] | None = None
    limit: Limit = 100


class RingQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    key: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    n: Limit = 3


class GroupQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    limit: Limit = 20
