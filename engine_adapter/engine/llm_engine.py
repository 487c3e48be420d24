"""The engine: requests in, tokens out, one step at a time.

    schedule → run → postprocess

Single-threaded and synchronous: the server calls everything here from one thread. What holds after each
step: KV that is named in the prefix cache was computed by a step that succeeded; a sequence that ended, for
whatever reason, holds nothing; a step that fails ends its own sequences with `error` and nobody else's.
Knows token ids only: text, templates and stop strings are the server's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine_adapter.engine.block_hash import BlockHash, namespace_hash, root_hash
from engine_adapter.engine.block_manager import BlockManager
from engine_adapter.engine.engine_config import EngineConfig
from engine_adapter.engine.engine_stats import EngineStats, collect_stats
from engine_adapter.engine.kv_storage import KVStorage, block_bytes
from engine_adapter.engine.loader import LoadedModel, load_model
from engine_adapter.engine.model import LlamaModel
from engine_adapter.engine.model_runner import ModelRunner, SampledTokens
from engine_adapter.engine.sampling import SamplingState, TokenLogprobs
from engine_adapter.engine.scheduler import ScheduledSequence, Scheduler
from engine_adapter.engine.sequence import EngineRequest, FinishReason, Sequence, Timings
from paged_kv.block_pool import BlockPool
from paged_kv.layout import KVDtype

logger = logging.getLogger(__name__)


class RequestRefused(ValueError):
    """The request can never run here; the message says which limit it breaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step did for one request."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was reused at the first admission
    num_preemptions: int
    timings: Timings
    error: str | None = None


class LLMEngine:
    """One model, one KV memory, many requests."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build an engine.

        Raises:
            ValueError: the settings contradict each other, or the KV memory holds no block.

        Changes: torch's thread count; empties `loaded.weights`, which the model takes over.
        """
        self.config = config or EngineConfig()
        torch.set_num_threads(self.config.num_threads)
        self.model_config = loaded.config
        self._clock = clock
        self._model = LlamaModel(loaded.config, loaded.weights)
        layer_dtypes = [self.config.storage_dtype] * loaded.config.num_hidden_layers
        num_blocks = self._num_blocks(layer_dtypes)
        self.storage = KVStorage(
            loaded.config,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            layer_dtypes=layer_dtypes,
            backend=self.config.attention_backend,
            device=self.config.device,
        )
        self._runner = ModelRunner(self._model, self.storage)
        self.blocks = BlockManager(
            BlockPool(num_blocks),
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(self.config.scheduler, self.blocks)
        self.root = self._root_hash(loaded.fingerprint, layer_dtypes)
        self.max_model_len = min(
            self.config.max_model_len or loaded.config.max_position_embeddings,
            num_blocks * self.config.block_size,
        )
        self._sequences: dict[str, Sequence] = {}
        self._num_arrived = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    @classmethod
    def from_path(cls, path: Path | str, config: EngineConfig | None = None) -> LLMEngine:
        """Load a checkpoint directory in the configured dtype and build an engine over it."""
        config = config or EngineConfig()
        return cls(load_model(path, config.torch_dtype), config)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestRefused: it can never run (empty, too long, unknown token, id in use).
            QueueFull: too many wait already.
        """
        self._check(request)
        prompt = list(request.prompt_token_ids)
        limit = request.sampling.max_tokens
        sequence = Sequence(
            request=request,
            namespace=self.namespace(request.cache_salt, request.adapter),
            arrival_order=self._num_arrived,
            timings=Timings(arrival_s=self._clock()),
            sampling_state=SamplingState(request.sampling, prompt),
            max_num_tokens=min(self.max_model_len, len(prompt) + limit if limit else self.max_model_len),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
        )
        self.scheduler.add(sequence)
        self._sequences[request.request_id] = sequence
        self._num_arrived += 1
        self._num_prompt_tokens += len(prompt)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is and free all it holds. Returns whether it was known."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self.scheduler.finish(sequence, FinishReason.ABORT)
        return True

    def step(self) -> list[StepOutput]:
        """Compute one step and return what it brought, also for requests that ended without a token."""
        batch = self.scheduler.schedule(self._clock())
        outputs = [self._ended(sequence) for sequence in batch.finished]
        if batch.scheduled:
            try:
                sampled = self._runner.run(batch.scheduled)
            except Exception as error:  # the boundary of one step: its requests end, the engine goes on
                logger.exception("engine_step_failed")
                outputs.extend(self._fail(batch.scheduled, error))
            else:
                outputs.extend(self._postprocess(batch.scheduled, sampled))
        return outputs

    def stats(self) -> EngineStats:
        """Return gauges and counters of this moment. Changes nothing."""
        return collect_stats(
            self.scheduler,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            bytes_per_token=self.storage.bytes_per_token,
        )

    def verify(self) -> None:
        """Assert that every block is accounted for. O(blocks): for idle moments and tests."""
        self.blocks.verify(list(self._sequences.values()))

    def namespace(self, cache_salt: str = "", adapter: str = "") -> BlockHash:
        """Return the root of the hash chains of one tenant."""
        return namespace_hash(self.root, cache_salt=cache_salt, adapter=adapter)

    def _check(self, request: EngineRequest) -> None:
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            raise RequestRefused("the prompt is empty")
        if num_tokens >= self.max_model_len:
            raise RequestRefused(
                f"the prompt has {num_tokens} tokens, at most {self.max_model_len - 1} fit this engine"
            )
        vocab_size = self.model_config.vocab_size
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= vocab_size:
            raise RequestRefused(f"the prompt has token ids outside 0..{vocab_size - 1}")
        if request.request_id in self._sequences:
            raise RequestRefused(f"request id {request.request_id!r} is in use")

    def _postprocess(
        self, scheduled: list[ScheduledSequence], sampled: list[SampledTokens | None]
    ) -> list[StepOutput]:
        """Record progress, name what is full, append new tokens and end what is done."""
        now_s = self._clock()
        outputs: list[StepOutput] = []
        for item, tokens in zip(scheduled, sampled, strict=True):
            sequence = item.sequence
            num_kept = 0 if tokens is None else len(tokens.token_ids)
            # The last token kept has no KV yet; drafts kept before it have.
            sequence.num_computed_tokens += item.num_new_tokens + max(num_kept - 1, 0)
            if tokens is not None:
                outputs.append(self._append(sequence, tokens, now_s))
            self.blocks.commit(sequence)
            if sequence.finish_reason is not None:
                self._retire(sequence)
        return outputs

    def _append(self, sequence: Sequence, tokens: SampledTokens, now_s: float) -> StepOutput:
        num_new = min(len(tokens.token_ids), sequence.max_num_tokens - sequence.num_tokens)
        new_token_ids = tokens.token_ids[:num_new]
        sequence.token_ids.extend(new_token_ids)
        self._num_generated_tokens += num_new
        timings = sequence.timings
        if timings.first_token_s is None:
            timings.first_token_s = now_s
        timings.last_token_s = now_s
        reason = None
        if new_token_ids[-1] in sequence.request.sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif sequence.num_tokens >= sequence.max_num_tokens:
            reason = FinishReason.LENGTH
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, sequence.num_tokens - 1)
        sequence.finish_reason = reason
        return self._output(sequence, reason, new_token_ids, tokens.logprobs[:num_new])

    def _retire(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None
        self.scheduler.finish(sequence, sequence.finish_reason)
        del self._sequences[sequence.request_id]

    def _fail(self, scheduled: list[ScheduledSequence], error: Exception) -> list[StepOutput]:
        outputs = []
        for item in scheduled:
            item.sequence.finish_reason = FinishReason.ERROR
            self._retire(item.sequence)
            outputs.append(
                self._output(item.sequence, FinishReason.ERROR, error=f"{type(error).__name__}: {error}")
            )
        return outputs

    def _ended(self, sequence: Sequence) -> StepOutput:
        """Report a sequence that the scheduler ended."""
        del self._sequences[sequence.request_id]
        return self._output(sequence, sequence.finish_reason)

    def _output(
        self,
        sequence: Sequence,
        reason: FinishReason | None,
        new_token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs | None] | None = None,
        error: str | None = None,
    ) -> StepOutput:
        return StepOutput(
            request_id=sequence.request_id,
            new_token_ids=new_token_ids or [],
            logprobs=logprobs or [],
            finish_reason=reason,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=sequence.num_output_tokens,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            num_preemptions=sequence.num_preemptions,
            timings=sequence.timings,
            error=error,
        )

    def _num_blocks(self, layer_dtypes: list[KVDtype]) -> int:
        if self.config.num_kv_blocks is not None:
            return self.config.num_kv_blocks
        size = block_bytes(self.model_config, block_size=self.config.block_size, layer_dtypes=layer_dtypes)
        if self.config.kv_memory_bytes < size:
            raise ValueError(
                f"kv_memory_bytes {self.config.kv_memory_bytes} is less than one block, {size} bytes"
            )
        return self.config.kv_memory_bytes // size

    def _root_hash(self, fingerprint: str, layer_dtypes: list[KVDtype]) -> BlockHash:
        """Name everything that KV depends on besides tokens; weights, tokenizer and template are one part."""
        return root_hash(
            {
                "model": fingerprint,
                "rope": repr((self.model_config.rope_theta, self.model_config.rope_scaling)),
                "compute_dtype": str(self._model.dtype),
                "kv_dtype": ",".join(dtype.value for dtype in layer_dtypes),
                "block_size": str(self.config.block_size),
            }
        )
