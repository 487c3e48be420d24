"""One request as the engine sees it: tokens, block table, progress, timings.

A sequence is a plain mutable record that scheduler, block manager and runner work on in turn; the rules are
theirs. Invariants: KV exists exactly for `token_ids[:num_computed_tokens]`, `block_table` covers at least
those tokens, and only blocks of computed tokens are named in the prefix cache. It lives in `kv`, below the
scheduler, because the block manager works on it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.model.sampling import SamplingParams, SamplingState
from paged_kv.block_pool import BlockId


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a sequence ended. `STOP` and `LENGTH` are OpenAI's words; the others are failures."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # the client disconnected
    TIMEOUT = "timeout"  # its deadline passed while it waited
    CAPACITY = "capacity"  # its prompt does not fit beside the pins, even with nothing else running
    ERROR = "error"  # the step that computed it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request from the server to the engine."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""  # set by the gateway; also identifies the tenant for fair queueing
    adapter: str = ""
    priority: int = 0  # lower is served first, as in vLLM
    deadline_s: float | None = None  # on the engine's clock; still waiting at this moment means TIMEOUT
    session_tag: str | None = None  # opaque names by which the gateway asks what is resident
    group_tag: str | None = None
    is_internal: bool = False  # computes a pin: no output is reported


@dataclass(slots=True, kw_only=True)
class Timings:
    """Times on the engine's clock, in seconds; None until reached."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Mutable state of one request inside the engine."""

    request: EngineRequest
    namespace: BlockHash  # root of its hash chain
    arrival_order: int
    timings: Timings
    sampling_state: SamplingState
    max_num_tokens: int  # prompt + output, limited by the request, the model and the pool
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # of the first admission; what `usage` reports
    num_loaded_tokens: dict[str, int] = field(default_factory=dict)  # of these, loaded from each tier
    load_id: int | None = None  # set: a tier is loading its blocks, nothing is computed until then
    block_table: list[BlockId] = field(default_factory=list)
    num_released_blocks: int = 0  # leading entries of block_table that the sliding window has passed
    block_hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks of token_ids
    num_committed_blocks: int = 0  # leading blocks already offered to the prefix cache
    num_awaited_blocks: int = 0  # block_hashes up to here were announced as about to be computed
    is_private: bool = False  # its further blocks cannot be cached (hash collision, or a forgotten parent)
    num_preemptions: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def held_blocks(self) -> list[BlockId]:
        return self.block_table[self.num_released_blocks :]

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt log-probabilities are requested that no step has computed yet."""
        is_wanted = self.request.sampling.num_prompt_logprobs is not None
        return is_wanted and len(self.sampling_state.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token lacks KV, so that a step of one token samples the next."""
        return self.num_output_tokens > 0 and self.num_uncomputed_tokens == 1

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service among running sequences; the greatest is preempted first."""
        return (self.request.priority, self.arrival_order)
