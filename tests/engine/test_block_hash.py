"""Names of KV content: canonical, chained, and distinct for everything that changes KV."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.engine.kv.block_hash import (
    block_hash,
    chain_hashes,
    encode_tokens,
    namespace_hash,
    root_hash,
)

PARTS = {"model": "m", "kv_dtype": "fp32"}


def independent_chain(
    parts: dict[str, str], salt: str, adapter: str, tokens: list[int], size: int
) -> list[bytes]:
    """The documented encoding, written a second time from its description."""

    def field(tag: str, value: str) -> bytes:
        return bytes([len(tag)]) + tag.encode() + len(value.encode()).to_bytes(4, "little") + value.encode()

    root = hashlib.sha256(b"homing.kv.root.v1" + b"".join(field(t, parts[t]) for t in sorted(parts))).digest()
    parent = hashlib.sha256(
        b"homing.kv.namespace.v1" + root + field("adapter", adapter) + field("salt", salt)
    ).digest()
    chain = []
    for start in range(0, len(tokens) // size * size, size):
        payload = struct.pack(f"<{size}I", *tokens[start : start + size])
        parent = hashlib.sha256(b"homing.kv.block.v1" + parent + payload).digest()
        chain.append(parent)
    return chain


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 8),
    st.text("ab€", max_size=4),
    st.text("ab", max_size=4),
)
def test_chain_follows_the_documented_encoding(tokens: list[int], size: int, salt: str, adapter: str) -> None:
    """Another implementation of the description computes the same names."""
    namespace = namespace_hash(root_hash(PARTS), cache_salt=salt, adapter=adapter)
    assert chain_hashes(namespace, tokens, size) == independent_chain(PARTS, salt, adapter, tokens, size)


def test_golden_name() -> None:
    """One name is frozen: a change of the encoding is a change of format and must be deliberate."""
    namespace = namespace_hash(root_hash(PARTS), cache_salt="tenant")
    assert chain_hashes(namespace, [1, 2, 3, 4], 4)[0].hex() == GOLDEN


GOLDEN = "1fefe9181dd100342cc4ee8dca743874bc7ce2eb23e54bc67381750f2f5a1775"


def test_names_do_not_depend_on_the_process() -> None:
    """A process with another hash seed computes the same name."""
    program = (
        "from engine_adapter.engine.kv.block_hash import *;"
        "print(chain_hashes(namespace_hash(root_hash({'model': 'm', 'kv_dtype': 'fp32'}),"
        "cache_salt='tenant'), [1, 2, 3, 4], 4)[0].hex())"
    )
    environment = {"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == GOLDEN


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_salt_and_adapter_cannot_be_confused(salt: str, adapter: str, salt2: str, adapter2: str) -> None:
    """Different (salt, adapter) pairs have different namespaces, however the texts are cut."""
    root = root_hash(PARTS)
    same = namespace_hash(root, cache_salt=salt, adapter=adapter) == namespace_hash(
        root, cache_salt=salt2, adapter=adapter2
    )
    assert same == ((salt, adapter) == (salt2, adapter2))


def test_every_part_of_the_model_counts() -> None:
    """Another model, dtype or extra part is another root; the order of the parts is not."""
    roots = {
        root_hash(PARTS),
        root_hash({**PARTS, "model": "n"}),
        root_hash({**PARTS, "kv_dtype": "bf16"}),
        root_hash({**PARTS, "rope": ""}),
    }
    assert len(roots) == 4
    assert root_hash(dict(reversed(PARTS.items()))) == root_hash(PARTS)


def test_same_tokens_at_another_place_have_another_name() -> None:
    """The chain makes position and history part of the name."""
    namespace = namespace_hash(root_hash(PARTS))
    chain = chain_hashes(namespace, [7, 7, 7, 7, 7, 7], 2)
    assert len(set(chain)) == 3
    assert chain[0] == block_hash(namespace, encode_tokens([7, 7]))
