"""Keeps pins over a restart: a JSON file of what to compute before the worker is ready.

The file is replaced atomically. It holds tokens, so it belongs to one tokenizer: it contains the model's
fingerprint, and a manifest of another model is ignored with a warning. Expired entries are dropped when read.
If the file cannot be read, the pins are lost but the worker starts. The prompts in it are private: mode 0600.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import msgspec

from engine_adapter.engine.kv.pins import PinSpec

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    pin_id: str
    token_ids: tuple[int, ...]
    name: str = ""
    owner: str = ""
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    expires_at_wall_s: float | None = None


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    fingerprint: str
    pins: list[_Entry]


def write_manifest(path: Path, fingerprint: str, pins: dict[str, PinSpec]) -> None:
    """Replace the manifest. Changes: the file, atomically.

    Raises:
        OSError: the folder cannot be written.
    """
    entries = [
        _Entry(pin_id=pin_id, **{name: getattr(spec, name) for name in PinSpec.__slots__})
        for pin_id, spec in pins.items()
    ]
    manifest = _Manifest(version=FORMAT_VERSION, fingerprint=fingerprint, pins=entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def read_manifest(path: Path, fingerprint: str, now_wall_s: float) -> dict[str, PinSpec]:
    """Return the pins to restore, by id; empty if there is no usable manifest."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=_Manifest)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("pin_manifest_unreadable", extra={"path": str(path), "error": str(error)})
        return {}
    if manifest.fingerprint != fingerprint or manifest.version != FORMAT_VERSION:
        logger.warning("pin_manifest_of_another_model", extra={"path": str(path)})
        return {}
    return {
        entry.pin_id: PinSpec(**{name: getattr(entry, name) for name in PinSpec.__slots__})
        for entry in manifest.pins
        if entry.expires_at_wall_s is None or entry.expires_at_wall_s > now_wall_s
    }
