"""The words of the gateway as types: what a request asks, what the fleet is, what was decided.

Every value here is immutable and knows no I/O. Pure code (`routing`, `wire`) speaks only in these;
the shell (`proxy`, `fleet`, `sessions`, `upstream`) turns sockets, clocks and stores into them.
Times are seconds on a monotonic clock unless a name says `wall`.

What is built on every request is a `msgspec.Struct` (a frozen dataclass costs ten times as much to build, and
these hold no cycles, so the collector need not track them); the rest are frozen dataclasses.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NewType

import msgspec

BackendId = NewType("BackendId", str)
"""Name of one addressable engine instance, unique in the fleet, `[A-Za-z0-9._-]{1,64}`."""

SessionKey = NewType("SessionKey", str)
"""HMAC of (tenant, model, client's session id) as 32 hex digits: safe to store, log and show."""

PromptKey = NewType("PromptKey", str)
"""HMAC of (tenant, model, normalised system prompt + tools) as 32 hex digits."""


class Api(enum.Enum):
    """The API dialect and operation of one request path; decides parsing and error shape."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is Python code, on the hot path

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    TOKENIZE = "tokenize"
    MODELS = "models"
    GENERATE = "generate"
    AUDIO = "audio"
    REALTIME = "realtime"
    OTHER = "other"


class KeySource(enum.Enum):
    """Where the affinity key of a request came from, best first (see `wire/keys.py`)."""

    __hash__ = object.__hash__  # as in `Api`

    HEADER = "header"
    BODY = "body"
    COOKIE = "cookie"
    RESPONSE_ID = "response_id"
    PROMPT_CACHE_KEY = "prompt_cache_key"
    FINGERPRINT = "fingerprint"
    PROMPT_GROUP = "prompt_group"
    NONE = "none"


class Affinity(enum.Enum):
    """What became of a request's affinity; the value of `x-homing-affinity`."""

    NEW = "new"  # first turn of a session: bound now
    HIT = "hit"  # bound session served at home
    MOVED = "moved"  # its home was lost, draining or reassigned: bound elsewhere, once
    SPILLED = "spilled"  # home is busy enough that moving pays: bound elsewhere
    FAILOVER = "failover"  # an attempt failed before the first byte: another backend answered
    UNPINNED = "unpinned"  # no session to bind (no key, prompt group only, or the store refused)


class BackendState(enum.Enum):
    """Life of a backend as routing sees it."""

    JOINING = "joining"  # configured, not yet seen healthy
    READY = "ready"
    DEGRADED = "degraded"  # answers, with errors or overload: only when nothing better is left
    DRAINING = "draining"  # no new sessions; bound ones move at their next turn
    CORDONED = "cordoned"  # no new sessions; bound ones stay
    DOWN = "down"
    REMOVED = "removed"

    @property
    def takes_new_sessions(self) -> bool:
        return self is BackendState.READY

    @property
    def keeps_sessions(self) -> bool:
        """A session bound here may stay for its next turn."""
        return self in (BackendState.READY, BackendState.DEGRADED, BackendState.CORDONED)

    @property
    def is_routable(self) -> bool:
        """Some request may be sent here, as a last resort at least."""
        return self not in (BackendState.DOWN, BackendState.REMOVED, BackendState.JOINING)


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message (or the system block, or the tool list) of a prompt, reduced to what routing needs."""

    chain_hash: int  # 64-bit hash chained over all that comes before, so equal hash = equal prefix
    num_bytes: int  # size of this message's text, for token estimates


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that routing knows of one request. Parsed once, in `wire`; holds no prompt text."""

    api: Api
    tenant: str = "default"
    model: str | None = None
    is_stream: bool = False
    session_key: SessionKey | None = None
    prompt_key: PromptKey | None = None
    answer_key: SessionKey | None = None  # of the stored answer that it is about or builds on
    key_source: KeySource = KeySource.NONE
    prefix: tuple[Message, ...] = ()  # system + tools first, then messages in order
    num_prompt_bytes: int = 0  # text that the engine will tokenize, estimated
    max_output_tokens: int | None = None
    is_follow_up: bool = False  # the prompt holds an assistant turn: part of a conversation under way
    sets_binding: bool = True  # auxiliary calls (titles, tags) follow a binding but never make one
    obeys_load_bound: bool = False  # the key is a bucket, not a session (prompt_cache_key, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One backend as configured and as last observed; a row of the `FleetView`."""

    backend_id: BackendId
    base_url: str
    engine: str = "openai"  # torch | vllm | sglang | llamacpp | trtllm | openai
    weight: float = 1.0
    state: BackendState = BackendState.JOINING
    epoch: int = 0  # one life of the cache; grows at each restart, cleared cache or address reuse
    since_s: float = 0.0  # monotonic time of the last change of state, for slow start
    models: frozenset[str] | None = None  # None: not known yet, anything may be served
    kv_capacity_tokens: int | None = None  # None: not known, a default is assumed
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """One immutable snapshot of the whole fleet. A change of state makes a new view."""

    generation: int = 0
    backends: Mapping[BackendId, Backend] = field(default_factory=dict)

    def get(self, backend_id: BackendId) -> Backend | None:
        return self.backends.get(backend_id)


class Binding(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Session → backend, as the session store keeps it.

    `version` orders the homes of one session: it grows at each claim and rebind, never at a renewal, so
    a late renewal of an older home can be told apart and refused. `expires_at_s` is on the clock of the
    store that holds it (monotonic in memory, wall time in Redis).
    """

    backend_id: BackendId
    epoch: int
    version: int = 1
    expires_at_s: float = 0.0
    context_tokens: int = 0  # prompt + completion tokens of the last turn, 0 when not known
    num_turns: int = 0


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One backend as weighed by a policy; lower price is better. Shown by explain."""

    backend_id: BackendId
    price: float
    reason: str = ""  # why it was considered: home | ring | prompt_group | least_work | last_resort
    expected_cached_tokens: int = 0
    wait_s: float = 0.0
    prefill_s: float = 0.0


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a request goes and why. `ranked` is what fail-over walks, best first, chosen included."""

    backend_id: BackendId
    affinity: Affinity
    reason: str  # short, bounded vocabulary: a metrics label
    ranked: tuple[Candidate, ...]
    key_source: KeySource
    expected_cached_tokens: int = 0
    prompt_tokens: int = 0  # estimate used
    policy: str = "homing"


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Token counts reported by the engine; `None` means the engine did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class ReloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one attempt to reload the configuration."""

    outcome: Literal["applied", "unchanged", "rejected"]
    generation: int
    """How many configurations have been in force, including the one at start."""
    changed: tuple[str, ...] = ()
    """Paths of the options that differ from the previous configuration."""
    errors: tuple[str, ...] = ()
    """Why nothing was changed: one line per reason, with the path of the option."""
