"""Runs prompts with n choices each and turns the engine's tokens into pieces of text.

Decides when a stop string ends a choice: it cuts the text and aborts the request in the engine. Invariants:
the pieces of a choice join to its whole text; every sampled token is counted once; a stop token is counted
but never shown. Leaving `pieces` early, by return, exception or cancellation, aborts all its requests in the
engine. It does not know HTTP or the shape of any answer.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from engine_adapter.engine.core.async_engine import AsyncEngine
from engine_adapter.engine.core.step_output import StepOutput
from engine_adapter.engine.kv.sequence import EngineRequest, FinishReason, Timings
from engine_adapter.engine.kv.tiers.tier_block import Tier
from engine_adapter.engine.model.sampling import SamplingParams, TokenLogprobs
from engine_adapter.engine.text.detokenizer import Detokenizer, StopStrings
from engine_adapter.engine.text.tokenizer import Tokenizer
from engine_adapter.server.errors import ApiError, internal_error, overloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and its request options, besides sampling."""

    token_ids: list[int]
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    session_tag: str | None = None
    group_tag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become text."""

    stop: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    is_prompt_only: bool = False  # the single sampled token is neither shown nor counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """A shown token with its log-probabilities, for requests that ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None  # None for the prompt's first token


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text of one choice, or its end (`finish_reason` set), or both."""

    index: int
    text: str
    tokens: tuple[ShownToken, ...] = ()
    finish_reason: str | None = None
    stop_string: str | None = None  # the one that ended it


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """Tokens and timings of one request so far. Changed by `pieces`, read when it ends."""

    num_prompt_tokens: int
    first_outputs: dict[int, StepOutput] = field(default_factory=dict)  # latest of each prompt's first choice
    num_completion_tokens: int = 0
    failure: FinishReason | None = None  # if a sequence did not end normally
    timings: Timings | None = None  # of the first choice
    token_gaps_s: list[float] = field(default_factory=list)  # between deliveries of the first choice
    last_delivery_s: float | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed, from any tier."""
        return sum(output.num_cached_tokens for output in self.first_outputs.values())

    def cached_tokens_by_tier(self) -> dict[str, int]:
        """Split the cached tokens by where their KV was when the request arrived."""
        outputs = self.first_outputs.values()
        loaded = {
            tier.value: sum(output.num_loaded_tokens.get(tier.value, 0) for output in outputs)
            for tier in Tier
        }
        return {"device": self.num_cached_tokens - sum(loaded.values()), **loaded}

    def extension(self) -> dict[str, object]:
        """Our additions to OpenAI's fields: times of the first choice in milliseconds, tokens by tier."""
        timings = self.timings
        if timings is None:
            return {}
        scheduled = timings.first_scheduled_s if timings.first_scheduled_s is not None else timings.arrival_s
        first = timings.first_token_s if timings.first_token_s is not None else scheduled
        last = timings.last_token_s if timings.last_token_s is not None else first
        spans = {
            "queue_ms": scheduled - timings.arrival_s,
            "prefill_ms": first - scheduled,
            "decode_ms": last - first,
        }
        rounded = {name: round(seconds * 1000, 3) for name, seconds in spans.items()}
        return {**rounded, "cached_tokens_by_tier": self.cached_tokens_by_tier()}


@dataclass(slots=True, kw_only=True)
class _Choice:
    index: int
    detokenizer: Detokenizer
    stops: StopStrings
    pending_tokens: list[ShownToken] = field(default_factory=list)
    unshown_prompt: list[int] = field(default_factory=list)  # if its log-probabilities are requested
    is_finished: bool = False


class Generation:
    """n choices for each prompt; choice indices count prompt by prompt."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        options: TextOptions,
        *,
        num_choices: int = 1,
    ) -> None:
        self._engine = engine
        self._choices: dict[str, _Choice] = {}
        self._requests: list[EngineRequest] = []
        for index, (prompt, choice) in enumerate(itertools.product(prompts, range(num_choices))):
            request_id = secrets.token_hex(12)
            self._requests.append(_engine_request(request_id, prompt, _of_choice(sampling, choice)))
            self._choices[request_id] = _Choice(
                index=index,
                detokenizer=Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens),
                stops=StopStrings(options.stop, include_stop=options.include_stop),
                unshown_prompt=prompt.token_ids if sampling.num_prompt_logprobs is not None else [],
            )
        self._num_choices = num_choices
        self._is_prompt_only = options.is_prompt_only
        self.stats = RequestStats(num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))

    def prompt_tail(self, num_tokens: int) -> list[int]:
        """The last tokens of the first prompt."""
        return self._requests[0].prompt_token_ids[-num_tokens:]

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield pieces of all choices as they come. Use under `contextlib.aclosing`.

        Raises:
            ApiError: overloaded, deadline passed, or the engine failed on this request.
            RequestRefused, QueueFull, EngineDead: as `AsyncEngine.generate`.
        """
        async with contextlib.aclosing(self._engine.generate(self._requests)) as outputs:
            async for output in outputs:
                choice = self._choices[output.request_id]
                if choice.is_finished:  # a stop string ended it, and the abort has not arrived yet
                    continue
                self._count(choice, output)
                piece = self._take(choice, output)
                if piece is not None:
                    yield piece
                if all(choice.is_finished for choice in self._choices.values()):
                    return

    def _count(self, choice: _Choice, output: StepOutput) -> None:
        self.stats.num_completion_tokens += 0 if self._is_prompt_only else len(output.new_token_ids)
        if choice.index % self._num_choices == 0:
            self.stats.first_outputs[choice.index] = output
        if choice.index != 0:
            return
        self.stats.timings = output.timings
        now_s = time.monotonic()
        if self.stats.last_delivery_s is not None:
            self.stats.token_gaps_s.append(now_s - self.stats.last_delivery_s)
        self.stats.last_delivery_s = now_s

    def _take(self, choice: _Choice, output: StepOutput) -> Piece | None:
        """Pass one step's tokens to the choice; return what can be shown."""
        if output.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            self.stats.failure = output.finish_reason
            raise _failure(output)
        if choice.unshown_prompt and output.new_token_ids:
            choice.pending_tokens = _scored_prompt(choice.unshown_prompt, output.prompt_logprobs)
            choice.unshown_prompt = []
        shown = output.new_token_ids
        if output.finish_reason is FinishReason.STOP:
            shown = shown[:-1]  # the stop token is not text
        if self._is_prompt_only:
            shown = []
        for token_id, logprobs in zip(shown, output.logprobs, strict=False):
            if logprobs is not None:
                choice.pending_tokens.append(ShownToken(token_id=token_id, logprobs=logprobs))
        text = choice.stops.push(choice.detokenizer.push(shown))
        reason = output.finish_reason.value if output.finish_reason else None
        if reason is not None and self._is_prompt_only:
            reason = "length"
        if reason is not None and choice.stops.matched is None:
            text += choice.stops.push(choice.detokenizer.flush())
        if choice.stops.matched is not None:
            reason = "stop"
            self._engine.abort(output.request_id)
        elif reason is not None:
            text += choice.stops.flush()
        choice.is_finished = reason is not None
        if not text and reason is None:
            return None
        tokens, choice.pending_tokens = tuple(choice.pending_tokens), []
        return Piece(
            index=choice.index,
            text=text,
            tokens=tokens,
            finish_reason=reason,
            stop_string=choice.stops.matched,
        )


def _scored_prompt(token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> list[ShownToken]:
    """Return the prompt's tokens with their log-probabilities; the first has none."""
    return [
        ShownToken(token_id=token_id, logprobs=score)
        for token_id, score in zip(token_ids, [None, *logprobs], strict=True)
    ]


def _of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Give each choice of a seeded request its own seed: choices differ, the request is reproducible."""
    if choice == 0 or sampling.seed is None:
        return sampling
    return replace(sampling, seed=sampling.seed + choice)


def _engine_request(request_id: str, prompt: Prompt, sampling: SamplingParams) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        sampling=sampling,
        cache_salt=prompt.cache_salt,
        priority=prompt.priority,
        deadline_s=prompt.deadline_s,
        session_tag=prompt.session_tag,
        group_tag=prompt.group_tag,
    )


def _failure(output: StepOutput) -> ApiError:
    """The error for a client whose sequence did not end normally."""
    if output.finish_reason is FinishReason.TIMEOUT:
        return overloaded("the request waited too long in the queue", code="queue_timeout", retry_after_s=2)
    if output.finish_reason is FinishReason.CAPACITY:
        message = "the prompt does not fit into the free KV memory"
        return overloaded(message, code="kv_capacity", retry_after_s=5)
    if output.finish_reason is FinishReason.ABORT:
        return overloaded("the request was aborted by the operator", code="aborted")
    return internal_error()
