"""The disk tier: against a dictionary over restarts, bounded, locked, and after kills and full disks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest
from engine.tier_chains import BLOCK_BYTES, Rows, append_all, chain_of, disk_tier, read_one
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_adapter.engine.kv.block_hash import BlockHash, root_hash
from engine_adapter.engine.kv.tiers.disk_tier import DiskTier, DiskTierUnusable
from engine_adapter.engine.kv.tiers.tier_block import TierBlock

MAX_BYTES = 400_000  # forty files of 26 blocks


class DiskTierMachine(RuleBasedStateMachine):
    """Appends, uses, damage and restarts: what is found is right, what was appended last is found."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.tier = disk_tier(Path(self.folder.name), MAX_BYTES)
        self.known: dict[BlockHash, tuple[TierBlock, bytes]] = {}
        self.seed = 0

    def append(self, chain: list[TierBlock], rows: Rows) -> int:
        for block, row in zip(chain, rows, strict=True):
            self.known[block.block_hash] = (block, row.tobytes())
        return append_all(self.tier, chain, rows)

    @rule(length=st.integers(1, 120))
    def append_a_new_chain(self, length: int) -> None:
        """A new chain that fits is there afterwards, whole."""
        self.seed += 1
        chain, rows = chain_of(self.seed, length)
        assert self.append(chain, rows) == length
        assert [read_one(self.tier, block) for block in chain] == [row.tobytes() for row in rows]

    @rule(choice=st.integers(0, 10_000), length=st.integers(1, 5))
    def continue_a_chain(self, choice: int, length: int) -> None:
        """A block is taken only behind a parent that is there."""
        if not self.known:
            return
        parent = list(self.known.values())[choice % len(self.known)][0]
        self.seed += 1
        is_reachable = self.tier.find(parent.block_hash) is not None
        assert self.append(*chain_of(self.seed, length, parent)) == (length if is_reachable else 0)

    @rule(choice=st.integers(0, 10_000))
    def use_or_repeat(self, choice: int) -> None:
        """A use changes no content; a block that is there is not written twice."""
        if not self.known:
            return
        block, data = list(self.known.values())[choice % len(self.known)]
        if self.tier.find(block.block_hash) is None:
            return
        self.tier.use(block.block_hash)
        assert not self.tier.append(block, np.frombuffer(data, np.uint8))

    @rule(choice=st.integers(0, 10_000))
    def damage_a_block(self, choice: int) -> None:
        """A block whose bytes changed is a miss, once; then it is forgotten and can be written anew."""
        if not self.known:
            return
        block, data = list(self.known.values())[choice % len(self.known)]
        place = self.tier.find(block.block_hash)
        if place is None:
            return
        with place.segment.path.open("r+b") as file:
            file.seek(place.segment.shape.payload_start + place.slot * BLOCK_BYTES + choice % BLOCK_BYTES)
            file.write(bytes([data[choice % BLOCK_BYTES] ^ 1]))
        num_damaged = self.tier.num_damaged
        assert read_one(self.tier, block) is None
        assert self.tier.num_damaged == num_damaged + 1
        assert self.tier.find(block.block_hash) is None

    @rule()
    def restart(self) -> None:
        """What was indexed and can still be reached is indexed again."""
        before = {name for name in self.known if self.tier.find(name) is not None}
        self.tier.close()
        self.tier = disk_tier(Path(self.folder.name), MAX_BYTES)
        after = {name for name in self.known if self.tier.find(name) is not None}
        for name in before:
            block = self.known[name][0]
            if block.depth == 0 or block.parent_hash in after:
                assert name in after

    @invariant()
    def what_is_found_is_right_and_bounded(self) -> None:
        """Reads give the appended bytes or nothing; the folder is never larger than it may be."""
        names = list(self.known)[-70:]
        for name in names:
            block, data = self.known[name]
            assert read_one(self.tier, block) in (None, data)
        sizes = [file.stat().st_size for file in Path(self.folder.name).glob("*.kv")]
        assert sum(sizes) <= MAX_BYTES
        assert self.tier.num_bytes <= MAX_BYTES

    def teardown(self) -> None:
        self.tier.close()
        self.folder.cleanup()


DiskTierMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestDiskTier = DiskTierMachine.TestCase


def found(tier: DiskTier, chain: list[TierBlock]) -> int:
    """Leading blocks of a chain that the tier has."""
    count = 0
    for block in chain:
        if read_one(tier, block) is None:
            break
        count += 1
    return count


def test_a_used_chain_outlives_unused_ones(tmp_path: Path) -> None:
    """However many chains come, one that is used between them stays whole; the unused are given up."""
    tier = disk_tier(tmp_path, MAX_BYTES)
    hot = chain_of(1, 60)
    append_all(tier, *hot)
    cold = [chain_of(seed, 60) for seed in range(2, 30)]
    for chain in cold:
        append_all(tier, *chain)
        tier.use(hot[0][-1].block_hash)
    assert found(tier, hot[0]) == 60
    assert tier.num_evictions > 0
    assert found(tier, cold[0][0]) < 60
    assert found(tier, cold[-1][0]) == 60
    tier.close()


def test_a_long_session_keeps_its_head(tmp_path: Path) -> None:
    """Appending to the tail counts as a use of the head, whose file is the oldest."""
    tier = disk_tier(tmp_path, MAX_BYTES)
    session, rows = chain_of(1, 60)
    append_all(tier, session, rows)
    for seed in range(2, 14):
        append_all(tier, *chain_of(seed, 150))
        more, more_rows = chain_of(100 + seed, 1, session[-1])
        append_all(tier, more, more_rows)
        session += more
    assert tier.num_evictions > 0
    assert found(tier, session) == len(session)
    tier.close()


def test_after_a_restart_heads_are_not_the_first_to_go(tmp_path: Path) -> None:
    """The order of use is unknown then: a file counts as used like the youngest that continues it."""
    tier = disk_tier(tmp_path, MAX_BYTES)
    session, rows = chain_of(1, 30)
    append_all(tier, session, rows)
    for seed in range(2, 5):
        append_all(tier, *chain_of(seed, 60))
    more, more_rows = chain_of(99, 40, session[-1])
    append_all(tier, more, more_rows)
    tier.close()
    tier = disk_tier(tmp_path, MAX_BYTES)
    while tier.num_evictions == 0:
        append_all(tier, *chain_of(1000 + len(tier), 30))
    assert found(tier, session + more) == 70
    tier.close()


def test_files_of_another_model_are_removed(tmp_path: Path) -> None:
    """They would only take space; other files are left alone."""
    tier = disk_tier(tmp_path, root=root_hash({"model": "old"}))
    append_all(tier, *chain_of(1, 3))
    tier.close()
    (tmp_path / "notes.txt").write_text("mine")
    tier = disk_tier(tmp_path)
    assert len(tier) == 0
    tier.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "notes.txt"]


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    """A second worker gets an error that names the owner and what to do; later the folder is free."""
    tier = disk_tier(tmp_path)
    with pytest.raises(DiskTierUnusable, match=f"in use by process {os.getpid()}: give each worker"):
        disk_tier(tmp_path)
    tier.close()
    tier.close()
    disk_tier(tmp_path).close()


@pytest.mark.parametrize("max_bytes", [0, 100, 16_000])
def test_too_little_space_is_refused(tmp_path: Path, max_bytes: int) -> None:
    """The message says how much one block takes."""
    with pytest.raises(DiskTierUnusable, match="too small: a file with one block takes"):
        disk_tier(tmp_path, max_bytes)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(DiskTierUnusable, match="cannot be written"):
        disk_tier(tmp_path / "taken")


def test_clearing_leaves_nothing(tmp_path: Path) -> None:
    """No file, no block; and the tier goes on working."""
    tier = disk_tier(tmp_path)
    chain, rows = chain_of(1, 5)
    append_all(tier, chain, rows)
    assert tier.clear() == 5
    assert list(tmp_path.glob("*.kv")) == []
    assert append_all(tier, chain, rows) == 5
    tier.close()


WRITE_FOR_EVER = """
    import sys
    from pathlib import Path
    from engine.tier_chains import append_all, chain_of, disk_tier
    tier = disk_tier(Path(sys.argv[1]), 400_000)
    for seed in range(1_000_000):
        append_all(tier, *chain_of(seed, 50))
        print(seed, flush=True)
"""


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_killed_writer_loses_nothing_it_had_written(tmp_path: Path) -> None:
    """Killed in the middle of writing, three times: every chain it reported is there, unchanged."""
    for num_chains in (3, 11, 20):
        process = run_python(WRITE_FOR_EVER, str(tmp_path))
        assert process.stdout is not None
        last = [int(process.stdout.readline()) for _ in range(num_chains)][-1]
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=30)
        last = max([last, *map(int, rest.split())])
        tier = disk_tier(tmp_path, 400_000)
        for seed in range(max(0, last - 3), last + 1):
            chain, rows = chain_of(seed, 50)
            assert [read_one(tier, block) for block in chain] == [row.tobytes() for row in rows]
        tier.clear()
        tier.close()


FILL = """
    import resource, sys
    from pathlib import Path
    from engine.tier_chains import chain_of, disk_tier, read_one
    from engine_adapter.engine.kv.tiers.disk_writer import DiskWriter
    now_s = [0.0]
    tier = disk_tier(Path(sys.argv[1]), 400_000)
    writer = DiskWriter(tier, clock=lambda: now_s[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, resource.RLIM_INFINITY))
    chain, rows = chain_of(1, 400)
    writer.offer(chain, rows)
    assert writer.flush(30)
    assert writer.num_errors == 1, writer.num_errors
    kept = sum(tier.find(block.block_hash) is not None for block in chain)
    assert 0 < kept == writer.num_written < 400
    assert all(read_one(tier, b) == row.tobytes() for b, row in list(zip(chain, rows))[:kept])
    assert not writer.has_room and writer.offer(*chain_of(2, 3)) == 0
    assert writer.num_dropped == 400 - kept - 1 + 3
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    now_s[0] = 31.0
    assert writer.has_room and writer.offer(chain, rows) == 400 and writer.flush(30)
    assert [read_one(tier, b) for b in chain] == [row.tobytes() for row in rows]
    writer.close()
    print("survived")
"""


def test_a_full_disk_costs_blocks_and_nothing_else(tmp_path: Path) -> None:
    """When the system refuses to grow the file: one error, a pause, dropped blocks; later all is written."""
    process = run_python(FILL, str(tmp_path))
    output, _ = process.communicate(timeout=60)
    assert output == "survived\n"
