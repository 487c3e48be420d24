"""One request as the engine sees it: tokens, block table, progress, clock.

A sequence is a plain mutable record on which scheduler, block manager and runner work in turn; the rules
live with them. What always holds: KV exists exactly for `token_ids[:num_computed_tokens]`, `block_table`
covers at least those, and only blocks of computed tokens are ever named in the prefix cache.
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
    """Why a sequence ended. `STOP` and `LENGTH` are OpenAI's words; the others are no normal ends."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # the client went away
    TIMEOUT = "timeout"  # its deadline passed while it waited
    CAPACITY = "capacity"  # nothing else runs and still its prompt does not fit beside the pins
    ERROR = "error"  # the step that computed it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What the server asks of the engine."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""  # set by the trusted side; also the unit of fairness between waiting requests
    adapter: str = ""
    priority: int = 0  # lower is served first, as in vLLM
    deadline_s: float | None = None  # on the engine's clock: still waiting then means TIMEOUT
    session_tag: str | None = None  # opaque names under which the gateway asks what is resident
    group_tag: str | None = None
    is_internal: bool = False  # the engine's own (a pin being computed): no output is reported


@dataclass(slots=True, kw_only=True)
class Timings:
    """Moments on the engine's clock, in seconds; None until reached."""

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
    num_loaded_tokens: dict[str, int] = field(default_factory=dict)  # of these, by tier below the device
    load_id: int | None = None  # set: a tier is loading its blocks, nothing is computed until then
    block_table: list[BlockId] = field(default_factory=list)
    num_released_blocks: int = 0  # leading entries of block_table that lie behind a sliding window
    block_hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks of token_ids
    num_committed_blocks: int = 0  # leading blocks already offered to the prefix cache
    num_awaited_blocks: int = 0  # block_hashes up to here were announced as about to be computed
    is_private: bool = False  # a hash collision: its further blocks cannot be named
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
        """Whether log-probabilities of the prompt are wanted that no step has computed yet."""
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
        """Only its newest token lacks KV: one more step of one token samples the next."""
        return self.num_output_tokens > 0 and self.num_uncomputed_tokens == 1

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service among running sequences; the greatest is the first to be preempted."""
        return (self.request.priority, self.arrival_order)
