"""What a debugger shows of the engine's parts: one line each."""

from __future__ import annotations

from engine.tiny_models import generate, tiny_engine

BLOCKS = "<BlockManager <BlockPool 64 blocks: 62 free, 2 cached, 0 used, 0 pinned>"


def test_each_part_shows_its_state_in_one_line() -> None:
    """After two equal requests: two cached blocks, and the second one hit both but for its last token."""
    engine = tiny_engine()
    for _ in range(2):
        generate(engine, list(range(1, 9)), 1)
    manager = f"{BLOCKS}, 2 in the prefix cache, 4 of 16 tokens hit>"
    scheduler = f"<Scheduler 0 running, 0 waiting, 0 preemptions, {manager}>"
    assert repr(engine.blocks.pool) == "<BlockPool 64 blocks: 62 free, 2 cached, 0 used, 0 pinned>"
    assert repr(engine.blocks.prefix_cache) == "<PrefixCache 2 blocks, 0 collisions>"
    assert repr(engine.blocks) == manager
    assert repr(engine.scheduler) == scheduler
    assert repr(engine) == f"<LLMEngine {engine.model_config.model_type}, {scheduler}, 0 pins>"
