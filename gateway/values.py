"""The value types of the gateway: request facts, the fleet, bindings and decisions.

All values but `StoreBudget` are immutable, and none does I/O. Pure code (`routing`, `wire`) uses only these
types; the other packages (`request`, `fleet`, `sessions`, `upstream`) translate sockets, clocks and stores
into them. Times are seconds on a monotonic clock unless the name says `wall`.

Values that are built for every request are `msgspec.Struct`s: a frozen dataclass costs ten times as much to
build, and these have no cycles, so the garbage collector need not track them. The rest are frozen
dataclasses.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, NewType

import msgspec
from msgspec import Meta

NAME_CHARACTERS: Final = "A-Za-z0-9._-"
MAX_NAME_LENGTH: Final = 64
NAME_PATTERN: Final = rf"[A-Za-z0-9][{NAME_CHARACTERS}]{{0,{MAX_NAME_LENGTH - 1}}}"
"""The names of backends and tenants, wherever they come from: files, sources, the admin API, Redis."""

Name = Annotated[str, Meta(pattern=rf"^{NAME_PATTERN}$(?!\n)")]
"""A name in a body that is decoded. Python's `$` also matches before a line feed at the end."""

BackendId = NewType("BackendId", str)
"""Name of one addressable engine instance, unique in the fleet, of `NAME_PATTERN`."""

SessionKey = NewType("SessionKey", str)
"""HMAC of (tenant, model, client's session id) as 32 hex digits. Safe to store, log and show."""

PromptKey = NewType("PromptKey", str)
"""HMAC of (tenant, model, normalised system prompt + tools) as 32 hex digits."""


class Api(enum.Enum):
    """The API dialect and operation of a request path. Decides how to parse it and the format of errors."""

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is slow Python code

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
    OBJECTS = "objects"  # files, batches and other objects that engines keep
    MESSAGE_BATCHES = "message_batches"  # Anthropic's batches: the same, with errors in its dialect
    OTHER = "other"


class KeySource(enum.Enum):
    """Where the affinity key of a request came from (see `wire/cascade.py`)."""

    __hash__ = object.__hash__  # as in `Api`

    HEADER = "header"
    BODY = "body"
    COOKIE = "cookie"
    RESPONSE_ID = "response_id"
    PROMPT_CACHE_KEY = "prompt_cache_key"
    FINGERPRINT = "fingerprint"
    PROMPT_GROUP = "prompt_group"
    NONE = "none"


class AttemptOutcome(enum.Enum):
    """What became of a request at the last backend that had it; the label `outcome` of its metrics.

    The status line alone does not tell: a stream may break, or say in an event that the engine has failed.
    """

    NOT_SENT = "not_sent"  # the gateway answered itself
    REFUSED = "refused"  # no connection to the backend
    NO_ANSWER = "no_answer"  # the connection ended, or time was up, before the head of an answer
    BACK_PRESSURE = "back_pressure"  # 429, 503, or the same said in an event: healthy and busy
    FAILED_BEFORE_CONTENT = "failed_before_content"  # a status, an event or an end instead of content
    FAILED_IN_STREAM = "failed_in_stream"  # after some content: the client has part of an answer
    ABORTED_BY_CLIENT = "aborted_by_client"
    COMPLETE = "complete"  # a whole answer; a 4xx too, which is about the request


class Affinity(enum.Enum):
    """How a request was placed relative to its session's home; the value of `x-homing-affinity`."""

    NEW = "new"  # first turn of a session, which is now bound
    HIT = "hit"  # a bound session, served at home
    MOVED = "moved"  # the home was lost, draining or reassigned: bound to another backend, once
    SPILLED = "spilled"  # the home is so busy that moving is cheaper: bound to another backend
    FAILOVER = "failover"  # an attempt failed before the first byte and another backend answered
    UNPINNED = "unpinned"  # no session to bind (no key, only a prompt group, or the store refused)


class BackendState(enum.Enum):
    """The state of a backend as seen by routing."""

    JOINING = "joining"  # configured, not yet seen healthy
    READY = "ready"
    DEGRADED = "degraded"  # on trial after failed requests: a few new sessions, more only as a last resort
    DRAINING = "draining"  # no new sessions; bound ones move at their next turn
    CORDONED = "cordoned"  # no new sessions; bound ones stay
    SLEEPING = "sleeping"  # alive, but computes nothing until it is woken
    DOWN = "down"
    REMOVED = "removed"

    @property
    def takes_new_sessions(self) -> bool:
        return self is BackendState.READY

    @property
    def keeps_sessions(self) -> bool:
        """Whether a session bound here may stay for its next turn."""
        return self in (BackendState.READY, BackendState.CORDONED)

    @property
    def is_routable(self) -> bool:
        """Whether requests may be sent here, at least as a last resort."""
        return self in _ROUTABLE


_ROUTABLE = (BackendState.READY, BackendState.DEGRADED, BackendState.CORDONED, BackendState.DRAINING)


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What routing needs of one message of a prompt (or its system block or tool list)."""

    chain_hash: int  # 64-bit hash chained over everything before, so equal hashes mean equal prefixes
    num_bytes: int  # size of this message's text, for token estimates


class IgnoredId(msgspec.Struct, frozen=True, gc=False):
    """An id that a client sent and that was not taken for a session's, see `routing/key_watch.py`."""

    key: SessionKey  # that it would have been
    reason: str  # never_repeats | shared


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Everything routing knows about a request. Parsed once, in `wire`; contains no prompt text."""

    api: Api
    tenant: str = "default"
    model: str | None = None
    is_stream: bool = False
    lacks_usage: bool = False  # a stream that will not tell its usage unless it is asked
    session_key: SessionKey | None = None
    prompt_key: PromptKey | None = None
    answer_key: SessionKey | None = None  # key of the stored response that it refers to or continues
    object_keys: tuple[SessionKey, ...] = ()  # keys of all other objects of engines that it names
    is_about_object: bool = False  # an object is made, read or changed, and nothing is computed
    key_source: KeySource = KeySource.NONE
    key_name: str = ""  # of the header, field or cookie that the key came from; "" for other sources
    fingerprint: SessionKey | None = None  # what the conversation is bound under where its id is ignored
    ignored_id: IgnoredId | None = None
    prefix: tuple[Message, ...] = ()  # system + tools first, then messages in order
    num_prompt_bytes: int = 0  # estimated text that the engine will tokenize
    max_output_tokens: int | None = None
    is_follow_up: bool = False  # the prompt has an assistant turn, so the conversation has begun
    names_request: bool = False  # its body says how the engine shall name it
    sets_binding: bool = True  # auxiliary calls (titles, tags) follow a binding but never make one
    obeys_load_bound: bool = False  # the key is a bucket, not a session (prompt_cache_key, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One backend of the `FleetView`: its configuration and last observed state."""

    backend_id: BackendId
    base_url: str
    engine: str = "openai"  # torch | vllm | sglang | llamacpp | trtllm | openai
    rank: int | None = None  # the data-parallel rank of an engine that has several behind one address
    weight: float = 1.0
    state: BackendState = BackendState.JOINING
    epoch: int = 0  # one lifetime of the cache; grows at a restart, a cleared cache or address reuse
    since_s: float = 0.0  # monotonic time of the last change of state, for slow start
    models: frozenset[str] | None = None  # None: not known yet, so any model is assumed
    context_tokens: Mapping[str, int] = field(default_factory=dict)  # longest prompt with answer, by model
    kv_capacity_tokens: int | None = None  # None: not known, so a default is assumed
    kv_block_tokens: int = 1  # prompts are cached in whole blocks of this size
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """An immutable snapshot of the whole fleet. A change of state makes a new view."""

    generation: int = 0
    backends: Mapping[BackendId, Backend] = field(default_factory=dict)

    def get(self, backend_id: BackendId) -> Backend | None:
        return self.backends.get(backend_id)

    def siblings(self, backend_id: BackendId) -> frozenset[BackendId]:
        """Return the ranks of the same engine, itself included: what ends its process ends all of them."""
        backend = self.backends.get(backend_id)
        if backend is None or backend.rank is None:
            return frozenset((backend_id,))
        url = backend.base_url
        return frozenset(other.backend_id for other in self.backends.values() if other.base_url == url)


class Binding(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Session → backend, as kept by the session store.

    `version` orders the homes of a session: it grows at each claim and rebind but not at a renewal, so a late
    renewal of an old home is recognised and refused. `expires_at_s` is on the store's clock (monotonic in
    memory, wall time in Redis).
    """

    backend_id: BackendId
    epoch: int
    version: int = 1
    expires_at_s: float = 0.0
    context_tokens: int = 0  # prompt + completion tokens of the last turn, 0 if not known
    num_turns: int = 0


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One backend as priced by a policy; a lower price is better. Shown by explain."""

    backend_id: BackendId
    price: float
    reason: str = ""  # why it was considered: home | ring | prompt_group | least_work | last_resort
    expected_cached_tokens: int = 0
    wait_s: float = 0.0
    prefill_s: float = 0.0


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a request goes and why. Fail-over goes through `ranked`, best first, chosen backend included."""

    backend_id: BackendId
    affinity: Affinity
    reason: str  # short, bounded vocabulary: a metrics label
    ranked: tuple[Candidate, ...]
    key_source: KeySource
    expected_cached_tokens: int = 0
    prompt_tokens: int = 0  # estimate used
    policy: str = "homing"


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Token counts reported by the engine; `None` means not reported."""

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


NO_TIME_S = 1e-9  # sums of short times are not exact


class StoreBudget:
    """How long one request may still wait for the session store, over all its calls; each call charges it."""

    __slots__ = ("silence_s", "total_s")

    def __init__(self, silence_s: float, total_s: float) -> None:
        self.silence_s = silence_s  # while the store owes an answer and does not send it
        self.total_s = total_s  # including our own queue

    @property
    def is_silence_spent(self) -> bool:
        return self.silence_s < NO_TIME_S

    @property
    def is_spent(self) -> bool:
        return self.silence_s < NO_TIME_S or self.total_s < NO_TIME_S

    def charge(self, seconds: float, *, is_silent: bool) -> None:
        self.total_s -= seconds
        if is_silent:
            self.silence_s -= seconds
