"""Settings of one engine, and what `auto` means on this machine. It does not know the model."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine_adapter.engine.kv.tiers.tier_config import TierConfig
from engine_adapter.engine.scheduling.scheduler import SchedulerConfig
from paged_kv.backends.attention import BACKEND_NAMES
from paged_kv.layout import KVDtype

MAX_MEAN_KL = 0.02  # nats per token; SmolLM2 in fp8 measures about 0.006

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_KV_DTYPE_OF = {
    torch.float32: KVDtype.FLOAT32,
    torch.bfloat16: KVDtype.BFLOAT16,
    torch.float16: KVDtype.FLOAT16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an operator can choose. The defaults suit one small machine."""

    dtype: str = "auto"  # auto, fp32, bf16 or fp16
    kv_dtype: str = "auto"  # auto (as dtype), fp32, bf16, fp16, fp8_e4m3 or int8
    block_size: int = 16
    kv_memory_bytes: int = 1 << 30
    num_kv_blocks: int | None = None  # overrides kv_memory_bytes
    max_model_len: int | None = None  # tokens; None: the model's own limit
    max_batch_tokens: int = 512
    max_prefill_tokens_beside_decodes: int = 128
    max_step_s: float | None = None  # limit of a step with prompts, half of it beside decodes; None: none
    max_num_sequences: int = 32
    max_num_waiting: int = 1024
    enable_prefix_caching: bool = True
    pin_budget_fraction: float = 0.5
    pin_manifest_path: Path | None = None  # None: pins are lost with the process
    max_kv_mean_kl: float = MAX_MEAN_KL  # above it, layers fall back from quantised KV
    num_threads: int = 1  # two torch threads become very slow when another process needs a core
    tiers: TierConfig = field(default_factory=TierConfig)  # host and disk below the KV memory
    debug_kv_guards: bool = False  # poison free blocks, checksum shared ones; slow
    attention_backend: str = "auto"  # auto or one of paged_kv.backends.attention.BACKEND_NAMES
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of auto, {', '.join(DTYPES)}")
        kv_names = [kind.value for kind in KVDtype]
        if self.kv_dtype != "auto" and self.kv_dtype not in kv_names:
            raise ValueError(f"kv_dtype {self.kv_dtype!r} is not one of auto, {', '.join(kv_names)}")
        if self.attention_backend not in ("auto", *BACKEND_NAMES):
            known = ", ".join(BACKEND_NAMES)
            raise ValueError(f"attention backend {self.attention_backend!r} is not one of auto, {known}")
        if not 0 <= self.pin_budget_fraction < 1:
            raise ValueError("pin_budget_fraction must be at least 0 and below 1: some blocks stay unpinned")
        if self.tiers.is_enabled and not self.enable_prefix_caching:
            raise ValueError("tiers need prefix caching: they store the blocks that the prefix cache names")

    @property
    def torch_dtype(self) -> torch.dtype:
        return fast_dtype(self.device) if self.dtype == "auto" else DTYPES[self.dtype]

    @property
    def storage_dtype(self) -> KVDtype:
        return plain_kv_dtype(self.torch_dtype) if self.kv_dtype == "auto" else KVDtype(self.kv_dtype)

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_batch_tokens=self.max_batch_tokens,
            max_prefill_tokens_beside_decodes=self.max_prefill_tokens_beside_decodes,
            max_step_s=self.max_step_s,
            max_num_sequences=self.max_num_sequences,
            max_num_waiting=self.max_num_waiting,
        )


def plain_kv_dtype(dtype: torch.dtype) -> KVDtype:
    """Return the KV type that stores values of this compute type unchanged."""
    return _KV_DTYPE_OF[dtype]


@functools.cache
def fast_dtype(device: str) -> torch.dtype:
    """Return bf16 where the processor multiplies it natively, else fp32 (emulated bf16 is slower)."""
    if device != "cpu":
        return torch.bfloat16
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return torch.float32
    native = any(f" {flag} " in f"{flags} " for flag in ("avx512_bf16", "amx_bf16"))
    return torch.bfloat16 if native else torch.float32
