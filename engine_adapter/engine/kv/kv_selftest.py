"""Measures at start whether quantised KV is good enough for this model.

The same prompts run with KV in the compute dtype and with quantised KV. The distance is the mean KL
divergence of the next-token distributions over all positions. If it exceeds the limit, layers fall back to
the compute dtype one by one, the most harmful first, until it does not; in the extreme case all layers fall
back. The result is reported. Some models need this (Qwen2.5 has a few layers with very large keys), most do
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_adapter.engine.kv.kv_storage import KVStorage
from engine_adapter.engine.model.model import LlamaModel
from paged_kv.batch import AttentionBatch
from paged_kv.layout import KVDtype

# Typical inputs: chat, prose with numbers, code, a letter. Short, because a start should take seconds.
SELFTEST_TEXTS = (
    "You are a helpful assistant. What is the capital of France, and why is it famous?",
    "In 1984, about 3.5 million people lived in the city; by 2020 it was 5 million, and the river had moved.",
    "def reverse(text):\n    return text[::-1]\n\nprint(reverse('hello world'))  # prints dlrow olleh\n",
    "Dear Sir or Madam,\nI am writing to complain about the delivery of my order, which arrived late.",
)

NUM_BUILT_IN_PROMPTS = 3
BUILT_IN_PROMPT_TOKENS = 96

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestReport:
    """What the self-test measured and decided."""

    requested: KVDtype
    mean_kl_before: float  # every layer quantised
    mean_kl: float  # with the layers that fell back
    top1_agreement: float  # share of positions with the same best token, with the layers that fell back
    max_mean_kl: float
    fallback_layers: tuple[int, ...]

    @property
    def is_off(self) -> bool:
        """Whether every layer has fallen back."""
        return self.mean_kl == 0.0 and bool(self.fallback_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Distance:
    mean_kl: float
    top1_agreement: float


def choose_layer_dtypes(
    model: LlamaModel,
    *,
    wanted: KVDtype,
    fallback: KVDtype,
    block_size: int,
    prompts: Prompts | None = None,
    max_mean_kl: float,
    backend: str = "torch",
    device: str = "cpu",
) -> tuple[list[KVDtype], SelfTestReport]:
    """Return the storage dtype of each layer, and what was measured.

    One forward pass per prompt where all is well; `num_layers` more per prompt where it is not.
    """
    probe = _Probe(model, block_size, prompts or built_in_prompts(model.config.vocab_size), backend, device)
    num_layers = model.config.num_hidden_layers
    reference = probe.log_probabilities([fallback] * num_layers)
    dtypes = [wanted] * num_layers
    distance = before = probe.distance(dtypes, reference)
    fallen: list[int] = []
    if not before.mean_kl <= max_mean_kl:  # written so that NaN counts as too far
        for layer in probe.most_sensitive_layers(wanted, fallback, reference):
            dtypes[layer] = fallback
            fallen.append(layer)
            distance = probe.distance(dtypes, reference)
            if distance.mean_kl <= max_mean_kl:
                break
    report = SelfTestReport(
        requested=wanted,
        mean_kl_before=before.mean_kl,
        mean_kl=distance.mean_kl,
        top1_agreement=distance.top1_agreement,
        max_mean_kl=max_mean_kl,
        fallback_layers=tuple(sorted(fallen)),
    )
    return dtypes, report


def built_in_prompts(vocab_size: int) -> list[list[int]]:
    """Return pseudo-random prompts for callers without a tokenizer, the same at every start."""
    generator = torch.Generator().manual_seed(0x484F4D49)
    shape = (NUM_BUILT_IN_PROMPTS, BUILT_IN_PROMPT_TOKENS)
    prompts: list[list[int]] = torch.randint(vocab_size, shape, generator=generator).tolist()
    return prompts


class _Probe:
    """Runs the prompts with given layer dtypes, in two chunks each, so that the second reads stored KV."""

    def __init__(
        self, model: LlamaModel, block_size: int, prompts: Prompts, backend: str, device: str
    ) -> None:
        self._model, self._block_size, self._backend, self._device = model, block_size, backend, device
        self._prompts = [list(prompt) for prompt in prompts if len(prompt) > 1]
        assert self._prompts, "the self-test needs prompts of at least two tokens"

    @torch.inference_mode()
    def log_probabilities(self, dtypes: Sequence[KVDtype]) -> torch.Tensor:
        """Return `(num_positions, vocab)` over all prompts."""
        longest = max(len(prompt) for prompt in self._prompts)
        storage = KVStorage(
            self._model.config,
            num_blocks=-(-longest // self._block_size),
            block_size=self._block_size,
            layer_dtypes=dtypes,
            backend=self._backend,
            device=self._device,
        )
        rows = []
        for prompt in self._prompts:
            middle = len(prompt) // 2
            rows += [
                self._run(storage, prompt, start, end) for start, end in ((0, middle), (middle, len(prompt)))
            ]
        return torch.log_softmax(torch.cat(rows), dim=-1)

    def _run(self, storage: KVStorage, prompt: list[int], start: int, end: int) -> torch.Tensor:
        batch = AttentionBatch.build(
            query_lens=[end - start],
            context_lens=[end],
            block_tables=[list(range(storage.num_blocks))],
            block_size=self._block_size,
        )
        device = self._model.device
        logits = self._model.forward(
            torch.tensor(prompt[start:end], device=device),
            torch.arange(start, end, device=device),
            batch,
            storage.layers,
            torch.arange(end - start, device=device),
        )
        assert logits is not None
        return logits

    def distance(self, dtypes: Sequence[KVDtype], reference: torch.Tensor) -> _Distance:
        actual = self.log_probabilities(dtypes)
        divergence = (reference.exp() * (reference - actual)).sum(dim=-1).mean()
        agreement = (reference.argmax(dim=-1) == actual.argmax(dim=-1)).float().mean()
        # Rounding can make a zero divergence slightly negative.
        return _Distance(mean_kl=max(float(divergence), 0.0), top1_agreement=float(agreement))

    def most_sensitive_layers(self, wanted: KVDtype, fallback: KVDtype, reference: torch.Tensor) -> list[int]:
        """Return all layers, ordered by how much quantising each alone changes the distributions."""
        num_layers = self._model.config.num_hidden_layers
        harm = []
        for layer in range(num_layers):
            dtypes = [wanted if index == layer else fallback for index in range(num_layers)]
            mean_kl = self.distance(dtypes, reference).mean_kl
            harm.append((float("inf") if mean_kl != mean_kl else mean_kl, layer))
        return [layer for _, layer in sorted(harm, reverse=True)]
