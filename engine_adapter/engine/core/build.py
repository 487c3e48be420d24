"""From a checkpoint and settings to a model, its KV memory, and the name of both.

Decides how the KV memory is divided: dtype per layer (after the self-test, where the dtype is quantised),
then as many blocks as the memory holds. Runs once, at start.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_adapter.engine.checkpoint.loader import LoadedModel
from engine_adapter.engine.core.config import EngineConfig, plain_kv_dtype
from engine_adapter.engine.kv.block_hash import BlockHash, root_hash
from engine_adapter.engine.kv.kv_selftest import Prompts, SelfTestReport, choose_layer_dtypes
from engine_adapter.engine.kv.kv_storage import KVStorage, block_bytes
from engine_adapter.engine.model.model import LlamaModel
from engine_adapter.engine.model.model_config import ModelConfig
from paged_kv.block_pool import BlockPool
from paged_kv.guards import BlockGuard
from paged_kv.layout import KVDtype
from paged_kv.transfers import BlockTransfers, transfers_for

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of."""

    model: LlamaModel
    storage: KVStorage
    root: BlockHash  # names everything that KV depends on besides tokens, salt and adapter
    selftest: SelfTestReport | None  # None where KV is stored as it is computed
    num_blocks_unquantised: int  # how many the same memory would hold without quantisation
    transfers: BlockTransfers
    guard: BlockGuard | None  # only in debug mode
    pool: BlockPool


def build_parts(loaded: LoadedModel, config: EngineConfig, selftest_prompts: Prompts | None) -> EngineParts:
    """Build model and KV memory.

    Raises:
        ValueError: the KV memory holds not even one block.

    Changes: empties `loaded.weights`.
    """
    model = LlamaModel(loaded.config, loaded.weights, dtype=loaded.dtype)
    _return_freed_memory()
    plain = plain_kv_dtype(model.dtype)
    layer_dtypes = [config.storage_dtype] * loaded.config.num_hidden_layers
    report = None
    if config.storage_dtype.is_quantised:
        layer_dtypes, report = choose_layer_dtypes(
            model,
            wanted=config.storage_dtype,
            fallback=plain,
            block_size=config.block_size,
            prompts=selftest_prompts,
            max_mean_kl=config.max_kv_mean_kl,
            backend=config.attention_backend,
            device=config.device,
        )
        _report_fallback(report)
    storage = KVStorage(
        loaded.config,
        num_blocks=num_kv_blocks(loaded.config, config, layer_dtypes),
        block_size=config.block_size,
        layer_dtypes=layer_dtypes,
        backend=config.attention_backend,
        device=config.device,
    )
    transfers = transfers_for(torch.device(config.device))
    guard = None
    if config.debug_kv_guards:
        guard = BlockGuard(storage, num_blocks=storage.num_blocks, block_bytes=storage.block_bytes)
    return EngineParts(
        model=model,
        storage=storage,
        transfers=transfers,
        guard=guard,
        pool=BlockPool(
            storage.num_blocks,
            # The order matters: whoever writes next, the guard included, waits for a store under way.
            on_taken=[transfers.before_reuse, *([guard.taken] if guard else [])],
            on_freed=[transfers.before_reuse, guard.freed] if guard else [],
        ),
        root=_root_hash(loaded, config, model, layer_dtypes),
        selftest=report,
        num_blocks_unquantised=num_kv_blocks(
            loaded.config, config, [plain] * loaded.config.num_hidden_layers
        ),
    )


def _return_freed_memory() -> None:
    """Give the loader's copies back to the system: glibc keeps what lies between live blocks, 120 MB here."""
    with contextlib.suppress(OSError, AttributeError):  # another C library: nothing to do
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def num_kv_blocks(model: ModelConfig, config: EngineConfig, layer_dtypes: Sequence[KVDtype]) -> int:
    """Return how many blocks the configured memory holds.

    Raises:
        ValueError: not even one.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    size = block_bytes(model, block_size=config.block_size, layer_dtypes=layer_dtypes)
    if config.kv_memory_bytes < size:
        raise ValueError(f"{config.kv_memory_bytes} bytes of KV memory hold no block: one takes {size} bytes")
    return config.kv_memory_bytes // size


def _root_hash(
    loaded: LoadedModel, config: EngineConfig, model: LlamaModel, layer_dtypes: Sequence[KVDtype]
) -> BlockHash:
    """Name the model; its fingerprint covers weights, tokenizer, template and config file."""
    return root_hash(
        {
            "model": loaded.fingerprint,
            "rope": repr((loaded.config.rope_theta, loaded.config.rope_scaling)),
            "compute_dtype": str(model.dtype),
            "kv_dtype": ",".join(dtype.value for dtype in layer_dtypes),
            "block_size": str(config.block_size),
        }
    )


def _report_fallback(report: SelfTestReport) -> None:
    facts = {
        "kv_dtype": report.requested.value,
        "mean_kl": report.mean_kl,
        "mean_kl_before": report.mean_kl_before,
        "top1_agreement": report.top1_agreement,
        "fallback_layers": report.fallback_layers,
    }
    if report.fallback_layers:
        logger.warning("kv_dtype_fell_back", extra=facts)
    else:
        logger.info("kv_dtype_self_test_passed", extra=facts)
