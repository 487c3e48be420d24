"""Turns a checkpoint and settings into a model, its KV memory, and the hash that names both.

Decides how the KV memory is divided: first the dtype of each layer (measured by the self-test if it is
quantised), then as many blocks as the memory holds. Runs once, at start.
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
from engine_adapter.engine.core.model_runner import ModelRunner
from engine_adapter.engine.kv.block_hash import BlockHash, root_hash
from engine_adapter.engine.kv.block_manager import BlockManager
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

    runner: ModelRunner
    storage: KVStorage
    blocks: BlockManager
    transfers: BlockTransfers
    guard: BlockGuard | None  # only in debug mode
    root: BlockHash  # names everything that KV depends on besides tokens, salt and adapter
    selftest: SelfTestReport | None  # None where KV is stored in the compute dtype
    num_blocks_unquantised: int  # how many the same memory would hold without quantisation


def build_parts(loaded: LoadedModel, config: EngineConfig, selftest_prompts: Prompts | None) -> EngineParts:
    """Build the model and its KV memory.

    Raises:
        ValueError: the KV memory does not hold a single block.

    Changes: empties `loaded.weights`.
    """
    model = LlamaModel(loaded.config, loaded.weights, dtype=loaded.dtype)
    _return_freed_memory()
    layer_dtypes, selftest = _layer_dtypes(model, config, selftest_prompts)
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
    blocks = BlockManager(
        _block_pool(storage, transfers, guard),
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        reach_tokens=loaded.config.reach_tokens,
    )
    plain = [plain_kv_dtype(model.dtype)] * loaded.config.num_hidden_layers
    return EngineParts(
        runner=ModelRunner(model, storage),
        storage=storage,
        blocks=blocks,
        transfers=transfers,
        guard=guard,
        root=_root_hash(loaded, config, model, layer_dtypes),
        selftest=selftest,
        num_blocks_unquantised=num_kv_blocks(loaded.config, config, plain),
    )


def _layer_dtypes(
    model: LlamaModel, config: EngineConfig, prompts: Prompts | None
) -> tuple[list[KVDtype], SelfTestReport | None]:
    """Return the KV dtype of each layer, and what the self-test found if there was one."""
    if not config.storage_dtype.is_quantised:
        return [config.storage_dtype] * model.config.num_hidden_layers, None
    layer_dtypes, report = choose_layer_dtypes(
        model,
        wanted=config.storage_dtype,
        fallback=plain_kv_dtype(model.dtype),
        block_size=config.block_size,
        prompts=prompts,
        max_mean_kl=config.max_kv_mean_kl,
        backend=config.attention_backend,
        device=config.device,
    )
    _log_selftest(report)
    return layer_dtypes, report


def _block_pool(storage: KVStorage, transfers: BlockTransfers, guard: BlockGuard | None) -> BlockPool:
    """Return a pool whose blocks are only reused after the store that still reads them."""
    if guard is None:
        return BlockPool(storage.num_blocks, on_taken=[transfers.before_reuse])
    # The order matters: the guard writes to the block too, so it waits for the store as well.
    return BlockPool(
        storage.num_blocks,
        on_taken=[transfers.before_reuse, guard.taken],
        on_freed=[transfers.before_reuse, guard.freed],
    )


def _return_freed_memory() -> None:
    """Return the loader's copies to the system: glibc keeps free memory between live blocks, 120 MB here."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def num_kv_blocks(model: ModelConfig, config: EngineConfig, layer_dtypes: Sequence[KVDtype]) -> int:
    """Return how many blocks the configured memory holds.

    Raises:
        ValueError: it does not hold a single one.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    size = block_bytes(model, block_size=config.block_size, layer_dtypes=layer_dtypes)
    if config.kv_memory_bytes < size:
        raise ValueError(f"{config.kv_memory_bytes} bytes of KV memory do not hold a block of {size} bytes")
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


def _log_selftest(report: SelfTestReport) -> None:
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
