"""Log-probabilities of a prompt's own tokens, for requests that score given text.

Every position needs its logits, so such a request computes its whole prompt, whatever is cached; each step
scores the positions that it computes. Memory is bounded: logits exist for SCORED_ROWS positions at a time,
and only the best few of each are kept. Scores survive a preemption.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine_adapter.engine.model.sampling import TokenLogprobs

SCORED_ROWS = 64  # times a vocabulary of 152k in fp32: 39 MB


def score_rows(
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    next_token_ids: list[int],
    num_top: int,
) -> list[TokenLogprobs]:
    """Return the log-probability of the token that follows each row, and the best `num_top` of the row.

    Args:
        hidden: `(num_rows, hidden_size)`, the hidden states before the output head.
        logits_of: the output head: rows to `(num_rows, vocab_size)` fp32.
        next_token_ids: the token that follows each row.
    """
    scores: list[TokenLogprobs] = []
    for start in range(0, len(next_token_ids), SCORED_ROWS):
        following = next_token_ids[start : start + SCORED_ROWS]
        logprobs = torch.log_softmax(logits_of(hidden[start : start + len(following)]), dim=-1)
        index = torch.tensor(following, device=logprobs.device)[:, None]
        chosen: list[float] = logprobs.gather(1, index)[:, 0].tolist()
        values, ids = torch.topk(logprobs, min(num_top, logprobs.shape[-1]))
        scores.extend(
            TokenLogprobs(logprob=logprob, top=tuple(zip(top_ids, top_values, strict=True)))
            for logprob, top_ids, top_values in zip(chosen, ids.tolist(), values.tolist(), strict=True)
        )
    return scores
