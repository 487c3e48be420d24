"""The usage object and the metrics of a finished request.

Decides how tokens are counted for the caller. Invariant: `cached_tokens` is always present, even if zero, and
is less than the prompt, because the last prompt token is always computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from engine_adapter.server.generation import Generation, Piece, RequestStats
from engine_adapter.server.generation_errors import engine_errors_as_answers
from engine_adapter.server.metrics import WorkerMetrics


def usage_of(stats: RequestStats) -> dict[str, object]:
    """OpenAI's usage object for chat and text completions."""
    return {
        "prompt_tokens": stats.num_prompt_tokens,
        "completion_tokens": stats.num_completion_tokens,
        "total_tokens": stats.num_prompt_tokens + stats.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.num_cached_tokens},
    }


async def accounted_pieces(
    metrics: WorkerMetrics, generation: Generation, prompt_param: str
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of a generation; record its metrics however it ends."""
    outcome = "abort"  # unless the generation finishes, the client has disconnected
    try:
        with engine_errors_as_answers(prompt_param):
            async with contextlib.aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
                    if piece.finish_reason is not None:
                        outcome = piece.finish_reason
    except Exception:
        failure = generation.stats.failure
        outcome = failure.value if failure is not None else "error"
        raise
    finally:
        record(metrics, generation.stats, outcome)


def record(metrics: WorkerMetrics, stats: RequestStats, reason: str) -> None:
    """Record a request that ended for `reason`. Changes: histograms and counters."""
    metrics.request_success[reason].inc()
    metrics.prompt_tokens_cached.inc(stats.num_cached_tokens)
    metrics.request_prompt_tokens.observe(stats.num_prompt_tokens)
    metrics.request_generation_tokens.observe(stats.num_completion_tokens)
    timings = stats.timings
    if timings is None or timings.first_scheduled_s is None or timings.first_token_s is None:
        return
    last_s = timings.last_token_s or timings.first_token_s
    metrics.request_queue_time_s.observe(timings.first_scheduled_s - timings.arrival_s)
    metrics.request_prefill_time_s.observe(timings.first_token_s - timings.first_scheduled_s)
    metrics.request_decode_time_s.observe(last_s - timings.first_token_s)
    metrics.time_to_first_token_s.observe(timings.first_token_s - timings.arrival_s)
    metrics.e2e_request_latency_s.observe(last_s - timings.arrival_s)
    for gap_s in stats.token_gaps_s:
        metrics.inter_token_latency_s.observe(gap_s)
