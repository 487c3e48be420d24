"""Fingerprint of a checkpoint: a SHA-256 over every file that affects tokens, keys or values.

A cached block may be read by a later process, so names and sizes are not enough: a fine-tune keeps both. The
weights are hashed in full once; the digest is remembered in the cache folder by path, size, modification time
and inode, because hashing 16 GB takes about ten seconds, too long for every restart. KV dtype and tenant are
not part of it: the block hash adds those.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

SMALL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MEMORY_FILE = "fingerprints.json"


def cache_root() -> Path:
    """The cache folder: `$HOMING_CACHE`, else `~/.cache/homing`. Its contents can be recreated."""
    configured = os.environ.get("HOMING_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "homing"


def fingerprint_directory(directory: Path, *, dtype: str) -> str:
    """Return 64 hex digits. Changes: remembers digests of large files in the cache folder, if possible."""
    digest = hashlib.sha256(f"homing-model-1\0{dtype}".encode())
    for name in SMALL_FILES:
        file = directory / name
        if file.is_file():
            digest.update(f"\0{name}\0{file_sha256(file)}".encode())
    memory = _read_memory()
    before = dict(memory)
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"\0{file.name}\0{_known_or_computed(file, memory)}".encode())
    if memory != before:
        _write_memory(memory)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(file: Path) -> str:
    """SHA-256 of a large file, computed once per version. Changes: remembers it in the cache folder."""
    memory = _read_memory()
    before = dict(memory)
    digest = _known_or_computed(file, memory)
    if memory != before:
        _write_memory(memory)
    return digest


def _known_or_computed(file: Path, memory: dict[str, str]) -> str:
    status = file.stat()
    key = f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}"
    if key not in memory:
        memory[key] = file_sha256(file)
    return memory[key]


def _read_memory() -> dict[str, str]:
    try:
        value = json.loads((cache_root() / MEMORY_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _write_memory(memory: dict[str, str]) -> None:
    """Replace the file atomically. A read-only cache folder is not an error: it only costs time."""
    try:
        cache_root().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache_root(), delete=False) as file:
            json.dump(memory, file)
        os.replace(file.name, cache_root() / MEMORY_FILE)
    except OSError:
        return
