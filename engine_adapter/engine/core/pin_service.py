"""Pin operations of the engine: accepted at once, computed by an internal request, kept over restarts.

Connects the pin table (what is held), the engine (which computes what is missing) and the manifest (what to
restore). The manifest is written when the set of pins changes, not when their progress does. If it cannot be
written, the pin still holds; the failure is logged and reported in `manifest_error`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.pin_manifest import read_manifest, write_manifest
from engine_adapter.engine.kv.pins import Pin, PinRefused, PinSpec, PinState, PinTable
from engine_adapter.engine.kv.sequence import EngineRequest
from engine_adapter.engine.model.sampling import SamplingParams
from engine_adapter.engine.scheduling.scheduler import QueueFull

logger = logging.getLogger(__name__)


class PinService:
    """All pin operations of one engine. Single-threaded, like the engine."""

    def __init__(
        self,
        table: PinTable,
        *,
        block_size: int,
        fingerprint: str,
        namespace: Callable[[str, str], BlockHash],
        submit: Callable[[EngineRequest], None],
        abort: Callable[[str], bool],
        manifest_path: Path | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.table = table
        self.manifest_error: str | None = None
        self._block_size = block_size
        self._fingerprint = fingerprint
        self._namespace = namespace
        self._submit = submit
        self._abort = abort
        self._manifest_path = manifest_path
        self._wall_clock = wall_clock
        self._restoring: set[str] = set()

    @property
    def is_restored(self) -> bool:
        """Whether every pin of the manifest has been computed, or has failed to be."""
        return not self._restoring

    def pin(self, spec: PinSpec) -> Pin:
        """Accept a pin; its state says how much of it is already held.

        Raises:
            PinRefused: too short, expired, or no budget.
        """
        pin = self._accept(spec, None)
        self._save()
        return pin

    def unpin(self, pin_id: str) -> bool:
        """Release a pin and stop computing it. Returns whether it was known."""
        pin = self.table.remove(pin_id)
        if pin is None:
            return False
        self._stop_computing(pin)
        self._save()
        return True

    def expire(self) -> None:
        """Release the pins whose lifetime has ended. Called before each step and when idle."""
        expired = self.table.expire()
        for pin in expired:
            self._stop_computing(pin)
            logger.info("pin_expired", extra={"pin_id": pin.pin_id})
        if expired:
            self._save()

    def restore(self) -> int:
        """Pin everything in the manifest again; returns how many pins were accepted."""
        if self._manifest_path is None:
            return 0
        specs = read_manifest(self._manifest_path, self._fingerprint, self._wall_clock())
        for pin_id, spec in specs.items():
            try:
                pin = self._accept(spec, pin_id)
            except PinRefused as refusal:
                logger.warning("pin_not_restored", extra={"pin_id": pin_id, "reason": str(refusal)})
                continue
            if pin.state is PinState.PENDING:
                self._restoring.add(pin_id)
        return len(self.table)

    def on_computed(self, request_id: str) -> None:
        """Hold what an internal request has computed; called while the request still holds its blocks."""
        pin = self.table.get(request_id)
        if pin is not None:
            self.table.settle(pin)
        self._restoring.discard(request_id)

    def _accept(self, spec: PinSpec, pin_id: str | None) -> Pin:
        pin = self.table.add(spec, self._namespace(spec.cache_salt, spec.adapter), pin_id)
        if pin.state is PinState.PENDING:
            prompt = list(spec.token_ids[: pin.num_allowed_blocks * self._block_size])
            try:
                self._submit(
                    EngineRequest(
                        request_id=pin.pin_id,
                        prompt_token_ids=prompt,
                        sampling=SamplingParams(temperature=0.0, max_tokens=1),
                        cache_salt=spec.cache_salt,
                        adapter=spec.adapter,
                        priority=spec.priority,
                        is_internal=True,
                    )
                )
            except (QueueFull, ValueError) as refusal:
                self.table.remove(pin.pin_id)
                raise PinRefused(f"the prefix cannot be computed now: {refusal}") from refusal
        return pin

    def _stop_computing(self, pin: Pin) -> None:
        self._restoring.discard(pin.pin_id)
        if pin.state is PinState.PENDING:
            self._abort(pin.pin_id)

    def _save(self) -> None:
        if self._manifest_path is None:
            return
        try:
            write_manifest(
                self._manifest_path, self._fingerprint, {pin.pin_id: pin.spec for pin in self.table.pins}
            )
            self.manifest_error = None
        except OSError as error:
            self.manifest_error = str(error)
            logger.warning("pin_manifest_not_written", extra={"error": str(error)})
