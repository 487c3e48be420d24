"""The engine: requests in, tokens out, one step at a time.

    schedule → run → postprocess

Single-threaded and synchronous: the server makes all calls from one thread. After each step:

- KV that is named in the prefix cache was computed by a step that succeeded;
- a sequence that has ended, for whatever reason, holds no blocks;
- a step that failed has ended its own sequences with `error`, and no others.

The engine knows token ids only. Text, templates and stop strings belong to the server.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from engine_adapter.engine.checkpoint.loader import LoadedModel, load_model
from engine_adapter.engine.core.build import build_parts
from engine_adapter.engine.core.config import EngineConfig
from engine_adapter.engine.core.model_runner import SampledToken
from engine_adapter.engine.core.pin_service import PinService
from engine_adapter.engine.core.stats import EngineStats, collect_stats
from engine_adapter.engine.core.step_output import StepOutput, output_of
from engine_adapter.engine.kv.block_hash import BlockHash, chain_hashes, namespace_hash
from engine_adapter.engine.kv.explain import Explanation, explain_prompt
from engine_adapter.engine.kv.inventory import TagInventory
from engine_adapter.engine.kv.kv_selftest import SELFTEST_TEXTS, Prompts
from engine_adapter.engine.kv.pins import PinTable
from engine_adapter.engine.kv.prefix_cache import CachedBlock
from engine_adapter.engine.kv.sequence import EngineRequest, FinishReason, Sequence, Timings
from engine_adapter.engine.kv.tiers.kv_tiers import KVTiers
from engine_adapter.engine.model.sampling import SamplingState
from engine_adapter.engine.scheduling.scheduler import ScheduledSequence, Scheduler
from engine_adapter.engine.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

MAX_REMEMBERED_NAMESPACES = 256  # of tenants; `explain` searches them for the same tokens


class BlockObserver(Protocol):
    def record(self, removed: list[CachedBlock], stored: list[CachedBlock]) -> None:
        """Receive one step's changes of the prefix cache, removals first. Must not block."""


class RequestRefused(ValueError):
    """The request can never run here; the message says which limit it exceeds."""


class LLMEngine:
    """One model, one KV memory, many requests."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        selftest_prompts: Prompts | None = None,
        observer: BlockObserver | None = None,
    ) -> None:
        """Build an engine. Pins of the manifest are requested at once; the first steps compute them.

        Args:
            selftest_prompts: token ids on which quantised KV is measured; None: pseudo-random ones.
            observer: receives the blocks that the prefix cache gains and loses.

        Raises:
            ValueError: the settings contradict each other, or the KV memory does not hold a block.

        Changes: torch's thread count; empties `loaded.weights`, which the model takes over.
        """
        self.config = config or EngineConfig()
        torch.set_num_threads(self.config.num_threads)
        parts = build_parts(loaded, self.config, selftest_prompts)
        self.model_config = loaded.config
        self.storage = parts.storage
        self.blocks = parts.blocks
        self.root = parts.root
        self.selftest = parts.selftest
        self.num_blocks_unquantised = parts.num_blocks_unquantised
        self.max_model_len = min(
            self.config.max_model_len or loaded.config.max_position_embeddings,
            parts.storage.num_blocks * self.config.block_size,
        )
        self._clock = clock
        self._runner = parts.runner
        self._guard = parts.guard
        self._observer = observer
        self._sequences: dict[str, Sequence] = {}
        self._namespaces: OrderedDict[BlockHash, None] = OrderedDict()
        self._num_arrived = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_integrity_failures = 0
        self.tiers = KVTiers(
            self.config.tiers,
            storage=parts.storage,
            blocks=self.blocks,
            transfers=parts.transfers,
            root=parts.root,
            clock=clock,
        )
        self.scheduler = Scheduler(self.config.scheduler, self.blocks, on_admitted=self.tiers.loads.begin)
        self.inventory = TagInventory(self.blocks.prefix_cache, self.config.block_size)
        self.pins = self._make_pins(loaded.fingerprint, wall_clock)
        self.pins.restore()

    def __repr__(self) -> str:
        return f"<LLMEngine {self.model_config.model_type}, {self.scheduler!r}, {len(self.pins.table)} pins>"

    def _make_pins(self, fingerprint: str, wall_clock: Callable[[], float]) -> PinService:
        table = PinTable(
            self.blocks,
            budget_fraction=self.config.pin_budget_fraction if self.config.enable_prefix_caching else 0.0,
            max_prefix_tokens=self.max_model_len - 1,
            wall_clock=wall_clock,
        )
        return PinService(
            table,
            block_size=self.config.block_size,
            fingerprint=fingerprint,
            namespace=self.namespace,
            submit=self.add_request,
            abort=self.abort,
            manifest_path=self.config.pin_manifest_path,
            wall_clock=wall_clock,
        )

    @classmethod
    def from_path(
        cls,
        path: Path | str,
        config: EngineConfig | None = None,
        *,
        selftest_prompts: Prompts | None = None,
        observer: BlockObserver | None = None,
    ) -> LLMEngine:
        """Load a checkpoint directory in the configured dtype and build an engine.

        Quantised KV is measured on built-in texts unless prompts are given.
        """
        config = config or EngineConfig()
        loaded = load_model(path, config.torch_dtype)
        if config.storage_dtype.is_quantised and selftest_prompts is None:
            tokenizer = load_tokenizer(path, loaded.config.eos_token_ids)
            selftest_prompts = [tokenizer.encode(text) for text in SELFTEST_TEXTS]
        return cls(loaded, config, selftest_prompts=selftest_prompts, observer=observer)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestRefused: it can never run (empty, too long, unknown token, id in use).
            QueueFull: too many requests are waiting.
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
        self._remember_namespace(sequence.namespace)
        self.scheduler.add(sequence)
        self._sequences[request.request_id] = sequence
        self._num_arrived += 1
        self._num_prompt_tokens += len(prompt)

    def abort(self, request_id: str) -> bool:
        """End a request, waiting or running, and free its blocks. Returns whether it was known."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        sequence.finish_reason = FinishReason.ABORT
        self._retire(sequence)
        return True

    def step(self) -> list[StepOutput]:
        """Compute one step; return its outputs, including those of requests that ended without a token."""
        self.pins.expire()
        loaded = self.tiers.loads.advance()
        started_s = self._clock()
        batch = self.scheduler.schedule(started_s)
        outputs = [self._report_ended(sequence) for sequence in batch.finished]
        computed: list[CachedBlock] = []
        if batch.scheduled:
            try:
                sampled = self._runner.run(batch.scheduled)
            except Exception as error:  # the step's own requests end, the engine continues
                logger.exception("engine_step_failed")
                outputs.extend(self._fail(batch.scheduled, error))
            else:
                elapsed_s = self._clock() - started_s
                self.scheduler.observe_step(batch, elapsed_s)
                self.tiers.observe_step(batch.num_prompt_tokens, elapsed_s)
                outputs.extend(self._postprocess(batch.scheduled, sampled, computed))
        elif self.tiers.loads.is_loading:
            self.tiers.loads.wait()
        self.tiers.stores.store(computed)
        # A loaded block may have been evicted again while the step was planned; then nothing is reported.
        still_cached = [
            entry for entry in loaded if self.blocks.prefix_cache.entry_of(entry.block_id) is entry
        ]
        self._notify_observer(still_cached + computed)
        return [output for output in outputs if output is not None]

    def tick(self) -> None:
        """Let pins expire; if the engine is idle, check that every block is accounted for.

        Call every few seconds. A failed check is logged and counted but does not stop the engine: serving
        with a lost block is better than not serving.
        """
        self.pins.expire()
        if self.has_work:
            return
        if self._guard is not None:
            self._guard.check_all()
        try:
            self.verify()
        except AssertionError as error:
            self._num_integrity_failures += 1
            logger.error("block_accounting_broken", extra={"error": str(error)})

    def close(self) -> None:
        """Write what is still queued for the tiers. Idempotent; no step may follow."""
        self.tiers.close()

    def clear_cache(self) -> int:
        """Forget every cached block that no sequence and no pin holds, and all blocks in the tiers.

        Returns the number of forgotten device blocks.
        """
        num_blocks = self.blocks.clear_cache()
        self.tiers.clear()
        self._notify_observer([])
        return num_blocks

    def explain(self, token_ids: list[int], cache_salt: str = "", adapter: str = "") -> Explanation:
        """Return how much of a prompt is cached now, and why not more. Changes nothing."""
        namespace, size = self.namespace(cache_salt, adapter), self.config.block_size
        explanation = explain_prompt(self.blocks, namespace, token_ids, tuple(self._namespaces))
        cached, reusable = explanation.num_cached_tokens // size, explanation.num_reusable_tokens // size
        missing = chain_hashes(namespace, token_ids, size)[cached:reusable]
        return replace(explanation, tier_tokens=self.tiers.count_following(missing))

    def stats(self) -> EngineStats:
        """Return the current gauges and counters. Changes nothing."""
        return collect_stats(
            self.scheduler,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            bytes_per_token=self.storage.bytes_per_token,
            num_pins=len(self.pins.table),
            num_integrity_failures=self._num_integrity_failures,
            tiers=self.tiers.stats(),
        )

    def verify(self) -> None:
        """Assert that every block is accounted for. O(blocks): for an idle engine and tests."""
        self.blocks.verify(list(self._sequences.values()), self.pins.table.pinned_blocks)

    def namespace(self, cache_salt: str = "", adapter: str = "") -> BlockHash:
        """Return the root of the hash chains of one tenant."""
        return namespace_hash(self.root, cache_salt=cache_salt, adapter=adapter)

    def _check(self, request: EngineRequest) -> None:
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            raise RequestRefused("the prompt is empty")
        if num_tokens >= self.max_model_len:
            raise RequestRefused(
                f"the prompt has {num_tokens} tokens, this engine takes at most {self.max_model_len - 1}"
            )
        vocab_size = self.model_config.vocab_size
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= vocab_size:
            raise RequestRefused(f"the prompt has token ids outside 0 to {vocab_size - 1}")
        if request.request_id in self._sequences:
            raise RequestRefused(f"request id {request.request_id!r} is already in use")

    def _postprocess(
        self,
        scheduled: list[ScheduledSequence],
        sampled: list[SampledToken | None],
        stored: list[CachedBlock],
    ) -> list[StepOutput | None]:
        """Record progress, append new tokens, cache full blocks and end finished sequences.

        Changes: appends to `stored` what the prefix cache gained.
        """
        now_s = self._clock()
        outputs: list[StepOutput | None] = []
        for item, token in zip(scheduled, sampled, strict=True):
            sequence = item.sequence
            if token is None:
                sequence.num_computed_tokens += item.num_new_tokens
            else:
                outputs.append(self._append(sequence, token, now_s))
            stored.extend(self.blocks.commit(sequence))
            if sequence.finish_reason is not None:
                self._retire(sequence)
        return outputs

    def _append(self, sequence: Sequence, token: SampledToken, now_s: float) -> StepOutput | None:
        """Append the new token, which has no KV yet, and decide whether it ends the sequence."""
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.token_ids.append(token.token_id)
        self._num_generated_tokens += 1
        timings = sequence.timings
        if timings.first_token_s is None:
            timings.first_token_s = now_s
        timings.last_token_s = now_s
        if token.token_id in sequence.request.sampling.stop_token_ids:
            sequence.finish_reason = FinishReason.STOP
        elif sequence.num_tokens >= sequence.max_num_tokens:
            sequence.finish_reason = FinishReason.LENGTH
        return output_of(sequence, sequence.finish_reason, token)

    def _retire(self, sequence: Sequence) -> None:
        """End a sequence: update its pin and its tags, then free its blocks."""
        assert sequence.finish_reason is not None
        self._on_retired(sequence)
        self.scheduler.finish(sequence, sequence.finish_reason)

    def _on_retired(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        request = sequence.request
        if request.is_internal:
            self.pins.on_computed(request.request_id)
        if request.session_tag is not None:
            self.inventory.record_session(request.session_tag, sequence.block_hashes)
        if request.group_tag is not None:
            num_prompt_blocks = sequence.num_prompt_tokens // self.config.block_size
            self.inventory.record_group(request.group_tag, sequence.block_hashes[:num_prompt_blocks])

    def _fail(self, scheduled: list[ScheduledSequence], error: Exception) -> list[StepOutput | None]:
        outputs = []
        for item in scheduled:
            item.sequence.finish_reason = FinishReason.ERROR
            self._retire(item.sequence)
            message = f"{type(error).__name__}: {error}"
            outputs.append(output_of(item.sequence, FinishReason.ERROR, error=message))
        return outputs

    def _report_ended(self, sequence: Sequence) -> StepOutput | None:
        """Report a sequence that the scheduler has ended."""
        self._on_retired(sequence)
        return output_of(sequence, sequence.finish_reason)

    def _notify_observer(self, stored: list[CachedBlock]) -> None:
        """Report what the prefix cache lost and gained; in debug mode, seal what it gained."""
        if self._guard is not None:
            for entry in stored:
                self._guard.sealed(entry.block_id)
        removed = self.blocks.eviction_log.take_unreported()
        if self._observer is not None and (removed or stored):
            self._observer.record(removed, stored)

    def _remember_namespace(self, namespace: BlockHash) -> None:
        self._namespaces[namespace] = None
        self._namespaces.move_to_end(namespace)
        if len(self._namespaces) > MAX_REMEMBERED_NAMESPACES:
            self._namespaces.popitem(last=False)
