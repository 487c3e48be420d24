"""A stub engine with a prefix cache of limited size: blocks of text, least recently used out first."""

from __future__ import annotations

import json
from collections import OrderedDict

from fakes.backend import Turn, chat_body, respond
from fakes.gateway_world import ProbedBackend

BLOCK_TOKENS = 16
TOKEN_BYTES = 4


class CachingEngine:
    """Gives `backend` a cache of `capacity_tokens`, which its metrics tell and its answers report."""

    def __init__(self, backend: ProbedBackend, capacity_tokens: int) -> None:
        self._max_blocks = capacity_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.reports: list[tuple[int, int]] = []  # (prompt, cached) tokens of each answer
        backend.more_metrics = (
            f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="{self._max_blocks}"}} 1.0\n'
        )
        backend.default = self.answer

    def clear(self) -> None:
        """As an operator does with vLLM's `/reset_prefix_cache`."""
        self._blocks.clear()

    async def answer(self, turn: Turn) -> None:
        text = "".join(str(message["content"]) for message in turn.request.json["messages"])
        prompt, cached = len(text) // TOKEN_BYTES, self._compute(text) * BLOCK_TOKENS
        self.reports.append((prompt, cached))
        usage: dict[str, object] = {
            "prompt_tokens": prompt,
            "completion_tokens": 5,
            "total_tokens": prompt + 5,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await respond(json.dumps(chat_body("ok", usage, turn.backend.model)).encode())(turn)

    def _compute(self, text: str) -> int:
        """Keep the whole blocks of a prompt; return how many from the first were there."""
        size, chain, chained = BLOCK_TOKENS * TOKEN_BYTES, 0, []
        for start in range(0, len(text) - size + 1, size):
            chain = hash((chain, text[start : start + size]))
            chained.append(chain)
        num_found = next((n for n, block in enumerate(chained) if block not in self._blocks), len(chained))
        for block in reversed(chained):  # the end goes first
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        return num_found
