"""The result of one step for one request, as the engine reports it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_adapter.engine.core.model_runner import SampledToken
from engine_adapter.engine.kv.sequence import FinishReason, Sequence, Timings
from engine_adapter.engine.model.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The result of one step for one request."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # with the first token, if requested
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was reused at the first admission
    num_loaded_tokens: dict[str, int] = field(default_factory=dict)  # of these, loaded from each tier
    num_preemptions: int
    timings: Timings
    error: str | None = None


def output_of(
    sequence: Sequence,
    reason: FinishReason | None,
    token: SampledToken | None = None,
    error: str | None = None,
) -> StepOutput | None:
    """Report a sequence after a step; None for internal requests, whose output nobody reads."""
    if sequence.request.is_internal:
        return None
    is_first_token = token is not None and sequence.num_output_tokens == 1
    return StepOutput(
        request_id=sequence.request_id,
        new_token_ids=[token.token_id] if token is not None else [],
        logprobs=[token.logprobs] if token is not None else [],
        prompt_logprobs=sequence.sampling_state.prompt_logprobs if is_first_token else [],
        finish_reason=reason,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        num_loaded_tokens=sequence.num_loaded_tokens,
        num_preemptions=sequence.num_preemptions,
        timings=sequence.timings,
        error=error,
    )
