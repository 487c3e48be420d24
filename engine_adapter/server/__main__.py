"""`python -m engine_adapter.server`: the worker's command line.

Decides the options and their defaults. Every expected failure at start is one line and exit code 2, never a
traceback.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from engine_adapter.engine.checkpoint.model_store import DEFAULT_MODEL_ID
from engine_adapter.engine.core.config import DTYPES, EngineConfig
from engine_adapter.engine.kv.kv_event_publisher import KVEventConfig
from engine_adapter.engine.kv.tiers.tier_config import TierConfig
from engine_adapter.server.app import MAX_BODY_BYTES
from engine_adapter.server.startup import ServerConfig, StartupFailed, run_server
from paged_kv.backends.attention import BACKEND_NAMES
from paged_kv.layout import KVDtype, parse_size


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, translate failures; return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        return run_server(_config(options))
    except (StartupFailed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="homing worker",
        description="OpenAI-compatible worker: one model, prefix reuse, continuous batching.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, defaults = parser.add_argument, EngineConfig()
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8001, help="port to listen on; 0 picks a free one")
    add(
        "--model", help=f"Hugging Face directory or .gguf file (default: {DEFAULT_MODEL_ID}, downloaded once)"
    )
    add("--served-model-name", nargs="+", help="names that requests may use (default: from --model)")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="of weights and activations")
    add("--threads", type=int, default=defaults.num_threads, help="torch threads")
    add("--device", default="cpu")
    add(
        *("--attention", "--attention-backend"),
        dest="attention_backend",
        default=defaults.attention_backend,
        choices=["auto", *BACKEND_NAMES],
        help="auto: torch on a CPU, our kernels (cupy) on a GPU",
    )
    _add_limits(parser, defaults)
    _add_kv_options(parser, defaults)
    add("--max-body-bytes", type=int, default=MAX_BODY_BYTES, help="largest request body")
    add("--drain-timeout", type=float, default=30.0, help="seconds for running requests after SIGTERM")
    add("--die-with-parent", action="store_true", help="exit when the parent process exits (Linux)")
    return parser


def _add_limits(parser: argparse.ArgumentParser, defaults: EngineConfig) -> None:
    add = parser.add_argument
    add("--max-model-len", type=int, help="context limit in tokens (default: the model's)")
    add("--max-batch-tokens", type=int, default=defaults.max_batch_tokens, help="tokens per step")
    add(
        "--max-step-seconds",
        type=float,
        default=0.5,
        help="prompts are cut so that no step takes longer, or half of it beside running streams",
    )
    add("--max-num-sequences", type=int, default=defaults.max_num_sequences, help="size of the batch")
    add("--max-num-waiting", type=int, default=defaults.max_num_waiting, help="queue limit, then 503")
    add("--max-queue-seconds", type=float, default=120.0, help="waiting limit per request, then 503")


def _add_kv_options(parser: argparse.ArgumentParser, defaults: EngineConfig) -> None:
    add = parser.add_argument
    add(
        "--kv-memory",
        default="1GiB",
        help="memory for the KV cache: a size, or a share (0.9) of what is free",
    )
    add("--num-kv-blocks", type=int, help="number of KV blocks, instead of --kv-memory")
    add("--kv-dtype", default="auto", choices=["auto", *(dtype.value for dtype in KVDtype)])
    add("--block-size", type=int, default=defaults.block_size, help="tokens per KV block")
    add("--no-prefix-caching", action="store_true", help="recompute every prompt")
    add("--pin-budget", type=float, default=defaults.pin_budget_fraction, help="share of blocks for pins")
    add("--pin-manifest", type=Path, help="file that keeps pins over a restart")
    add("--kv-events", metavar="ENDPOINT", help="publish KV events over ZMQ, such as tcp://127.0.0.1:5557")
    add(
        "--kv-events-replay",
        metavar="ENDPOINT",
        default="tcp://127.0.0.1:*",
        help="answer replay requests here",
    )
    add("--kv-host-bytes", default="0", help="host memory for KV that has left the device, such as 8GiB")
    add("--kv-disk-path", type=Path, help="folder that keeps KV over a restart; one for each worker")
    add("--kv-disk-bytes", default="16GiB", help="space that this folder may use")
    add("--debug-kv-guards", action="store_true", help="stop at the first misuse of a KV block; slow")


def _config(options: argparse.Namespace) -> ServerConfig:
    return ServerConfig(
        host=options.host,
        port=options.port,
        model=options.model,
        model_names=tuple(options.served_model_name or [_name_of(options.model)]),
        drain_timeout_s=options.drain_timeout,
        max_queue_s=options.max_queue_seconds,
        max_body_bytes=options.max_body_bytes,
        dies_with_parent=options.die_with_parent,
        kv_memory=options.kv_memory,
        kv_events=_kv_events(options),
        engine=EngineConfig(
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            block_size=options.block_size,
            num_kv_blocks=options.num_kv_blocks,
            max_model_len=options.max_model_len,
            max_batch_tokens=options.max_batch_tokens,
            max_step_s=options.max_step_seconds,
            max_num_sequences=options.max_num_sequences,
            max_num_waiting=options.max_num_waiting,
            enable_prefix_caching=not options.no_prefix_caching,
            pin_budget_fraction=options.pin_budget,
            pin_manifest_path=options.pin_manifest,
            tiers=TierConfig(
                host_bytes=parse_size(options.kv_host_bytes, option="--kv-host-bytes"),
                disk_path=options.kv_disk_path,
                disk_bytes=parse_size(options.kv_disk_bytes, option="--kv-disk-bytes"),
            ),
            debug_kv_guards=options.debug_kv_guards,
            num_threads=options.threads,
            attention_backend=options.attention_backend,
            device=options.device,
        ),
    )


def _kv_events(options: argparse.Namespace) -> KVEventConfig | None:
    if options.kv_events is None:
        return None
    return KVEventConfig(endpoint=options.kv_events, replay_endpoint=options.kv_events_replay)


def _name_of(model: str | None) -> str:
    """The default served name: the file's or folder's own."""
    if model is None:
        return DEFAULT_MODEL_ID
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name


if __name__ == "__main__":
    sys.exit(main())
