"""Hashes that name KV content. Any process can compute the same name from the same tokens.

A block's KV depends on every token before it and on everything that turns tokens into KV, so its name is a
chain of hashes. All integers are little-endian and unsigned; `‖` is concatenation; a *field* is

    field(tag, value) = u8 length of tag ‖ tag ‖ u32 length of value ‖ value

    root      = SHA-256( "homing.kv.root.v1"      ‖ field per part of the model, sorted by tag )
    namespace = SHA-256( "homing.kv.namespace.v1" ‖ root ‖ field("adapter", …) ‖ field("salt", …) )
    block     = SHA-256( "homing.kv.block.v1"     ‖ parent ‖ u32 token id × block_size )

`parent` is the previous block's hash, or the namespace for the first block. Only full blocks have a name.
Lengths make the fields unambiguous: salt "a" + adapter "b" never equals salt "ab" + adapter "".
Deterministic across processes and machines: no seed, no pickling, no `hash()`. It does not know caches.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import NewType

import numpy as np

BlockHash = NewType("BlockHash", bytes)
"""32 bytes naming the KV of one full block and, by chaining, of all before it."""

_ROOT_TAG = b"homing.kv.root.v1"
_NAMESPACE_TAG = b"homing.kv.namespace.v1"
_BLOCK_TAG = b"homing.kv.block.v1"

TOKEN_BYTES = 4


def root_hash(parts: Mapping[str, str]) -> BlockHash:
    """Hash everything that KV depends on: weights, tokenizer, template, RoPE, KV dtype, block size."""
    digest = hashlib.sha256(_ROOT_TAG)
    for tag in sorted(parts):
        digest.update(_field(tag, parts[tag]))
    return BlockHash(digest.digest())


def namespace_hash(root: BlockHash, *, cache_salt: str = "", adapter: str = "") -> BlockHash:
    """Hash one tenant's namespace: equal prompts under different salts share nothing."""
    payload = _NAMESPACE_TAG + root + _field("adapter", adapter) + _field("salt", cache_salt)
    return BlockHash(hashlib.sha256(payload).digest())


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as u32 little-endian, the form that is hashed and compared."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def num_common_tokens(first: bytes, second: bytes) -> int:
    """Return how many leading tokens two encoded token lists have in common."""
    size = min(len(first), len(second)) // TOKEN_BYTES
    left, right = np.frombuffer(first, "<u4", size), np.frombuffer(second, "<u4", size)
    different = np.nonzero(left != right)[0]
    return int(different[0]) if len(different) else size


def block_hash(parent: BlockHash, token_bytes: bytes) -> BlockHash:
    """Hash one full block's encoded tokens after its parent."""
    return BlockHash(hashlib.sha256(_BLOCK_TAG + parent + token_bytes).digest())


def chain_hashes(namespace: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hash every full block of a token sequence, first block first."""
    encoded = encode_tokens(token_ids)
    stride = block_size * TOKEN_BYTES
    hashes: list[BlockHash] = []
    parent = namespace
    for start in range(0, len(encoded) - stride + 1, stride):
        parent = block_hash(parent, encoded[start : start + stride])
        hashes.append(parent)
    return hashes


def _field(tag: str, value: str) -> bytes:
    # surrogatepass: a lone surrogate from a JSON body needs an unambiguous encoding too.
    tag_bytes, value_bytes = tag.encode(), value.encode("utf-8", "surrogatepass")
    return struct.pack("<B", len(tag_bytes)) + tag_bytes + struct.pack("<I", len(value_bytes)) + value_bytes
