"""Reasoning separated from answers: the parser, both dialects, and a template's switch."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from engine.worker_app import MODEL, Worker, running_worker, sse_events
from fakes.tiny_checkpoint import CHAT_TEMPLATE, write_tiny_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.engine.text.reasoning import ReasoningParser, ReasoningPlace, reasoning_place
from engine_adapter.server.messages_api import BlockWriter

# As Qwen3's: told not to think it writes empty thoughts itself; `opens` is for models that always think.
SWITCHED = CHAT_TEMPLATE.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% if opens is defined %}<think>\n{% endif %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi"}]
ENABLED = {"type": "enabled", "budget_tokens": 4}


def template_of_worker(checkpoint: Path, template: str) -> Path:
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return template_of_worker(write_tiny_checkpoint(tmp_path_factory.mktemp("switched")), SWITCHED)


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[Worker]:
    async with running_worker(checkpoint) as running:
        yield running


def split(place: ReasoningPlace, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(place)
    found = [parser.push(piece) for piece in pieces] + [parser.flush()]
    return "".join(thought for thought, _ in found), "".join(text for _, text in found)


@pytest.mark.parametrize(
    ("place", "text", "expected"),
    [
        (ReasoningPlace.MARKED, "<think>\na b\n</think>\n\nyes", ("a b", "yes")),
        (ReasoningPlace.MARKED, "<think>\n\n</think>\n\nyes", ("", "yes")),
        (ReasoningPlace.MARKED, "yes <think>no</think>", ("", "yes <think>no</think>")),
        (ReasoningPlace.MARKED, "<thin", ("", "<thin")),
        (ReasoningPlace.MARKED, "<think>cut of", ("cut of", "")),
        (ReasoningPlace.OPENED, "a </thin b</think>yes", ("a </thin b", "yes")),
        (ReasoningPlace.OPENED, "cut </thi", ("cut </thi", "")),
        (ReasoningPlace.NOWHERE, "<think>a</think>b", ("", "<think>a</think>b")),
    ],
)
def test_thoughts_end_where_the_text_begins(
    place: ReasoningPlace, text: str, expected: tuple[str, str]
) -> None:
    """Only reasoning at the start counts; text cut off is kept; white space around the markers is not."""
    assert split(place, [text]) == expected


@given(
    place=st.sampled_from(ReasoningPlace),
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "a", " ", "\n", "b<"])),
)
def test_any_cutting_gives_the_same(place: ReasoningPlace, pieces: list[str]) -> None:
    """Pieces, single characters and the whole text are read alike."""
    whole = "".join(pieces)
    assert split(place, pieces) == split(place, [whole]) == split(place, list(whole))


def test_the_template_and_the_prompt_tell_the_place() -> None:
    """Templates without markers are left alone; a prompt that ends with the first has opened it."""
    assert reasoning_place(CHAT_TEMPLATE, "<think>\n") is ReasoningPlace.NOWHERE
    assert reasoning_place(SWITCHED, "assistant\n") is ReasoningPlace.MARKED
    assert reasoning_place(SWITCHED, "assistant\n<think>\n") is ReasoningPlace.OPENED


async def test_openai_thoughts_are_reasoning_content(worker: Worker) -> None:
    """Whole and streamed: thoughts in reasoning_content, the rest in content."""
    pytest.importorskip("xgrammar", reason="needs the extra homing[grammar]")
    asked: dict[str, Any] = {
        "guided_regex": "<think>\nhm\n</think>\n\nyes",
        "max_tokens": 60,
        "ignore_eos": False,
    }
    message = (await (await worker.chat(**asked)).json())["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    *chunks, _ = sse_events(await (await worker.chat(stream=True, **asked)).read())
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"


async def test_an_opened_prompt_starts_inside_unless_a_grammar_writes_the_answer(worker: Worker) -> None:
    """The random model never ends its thoughts; a grammar's answer has none."""
    opened = {"chat_template_kwargs": {"opens": True}}
    message = (await (await worker.chat(**opened)).json())["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] == ""
    pytest.importorskip("xgrammar", reason="needs the extra homing[grammar]")
    answer = await (await worker.chat(guided_choice=["yes"], ignore_eos=False, **opened)).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "yes"}


async def count(worker: Worker, **fields: object) -> int:
    body = {"model": MODEL, "messages": MESSAGES, **fields}
    answer = await worker.client.post("/v1/messages/count_tokens", json=body)
    return int((await answer.json())["input_tokens"])


async def test_anthropic_thinking_moves_the_switch(worker: Worker) -> None:
    """disabled reaches the template; enabled, adaptive and no field leave the template's default."""
    sizes = [await count(worker, thinking=kind) for kind in (None, ENABLED, {"type": "adaptive"})]
    assert len(set(sizes)) == 1
    assert await count(worker, thinking={"type": "disabled"}) == sizes[0] + len("<think>\n\n</think>\n\n")


async def test_anthropic_thinking_is_no_error_without_a_switch(tmp_path: Path) -> None:
    """A model without a thinking mode answers as ever: agents send `thinking` to every model."""
    async with running_worker(write_tiny_checkpoint(tmp_path / "plain")) as worker:
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "thinking": ENABLED}
        response = await worker.client.post("/v1/messages", json=body)
        assert response.status == 200
        assert "thinking" not in [block["type"] for block in (await response.json())["content"]]


@pytest.mark.parametrize(
    "thinking",
    [
        {"type": "enabled"},
        {"type": "enabled", "budget_tokens": 0},
        {"type": "enabled", "budget_tokens": 5},
        {"type": "enabled", "budget_tokens": 1.5},
        {"type": "perhaps"},
    ],
)
async def test_anthropic_wrong_thinking_is_refused(worker: Worker, thinking: dict[str, object]) -> None:
    """A 400 in Anthropic's envelope that names the field."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "thinking": thinking}
    response = await worker.client.post("/v1/messages", json=body)
    document = await response.json()
    assert (response.status, document["error"]["type"]) == (400, "invalid_request_error")
    assert "thinking" in document["error"]["message"]


async def test_anthropic_thoughts_are_blocks_there_and_back(checkpoint: Path, tmp_path: Path) -> None:
    """Vendor's client: whole and streamed thinking agree, and go back as history that the template gets."""
    template = SWITCHED.replace("opens is defined", "true").replace(
        "{{ message['content'] }}", "{{ message.reasoning_content }}{{ message['content'] }}"
    )
    folder = template_of_worker(write_tiny_checkpoint(tmp_path / "opened"), template)
    async with running_worker(folder) as worker:
        url = str(worker.client.make_url("/"))
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            request: dict[str, Any] = {
                "model": MODEL,
                "max_tokens": 12,
                "messages": MESSAGES,
                "extra_body": {"temperature": 0},
            }
            whole = await client.messages.create(**request)
            async with client.messages.stream(**request) as stream:
                final = await stream.get_final_message()
        (block,) = whole.content
        assert block.type == "thinking"
        assert final.content[0].type == "thinking"
        assert final.content[0].thinking == block.thinking
        history = [*MESSAGES, {"role": "assistant", "content": [block.model_dump()]}, *MESSAGES]
        without = [*MESSAGES, {"role": "assistant", "content": ""}, *MESSAGES]
        gained = await count(worker, messages=history) - await count(worker, messages=without)
        assert gained == len(block.thinking.encode())


def test_anthropic_blocks_follow_each_other() -> None:
    """Thoughts, text and a call are blocks 0, 1 and 2; each ends before the next starts."""
    writer = BlockWriter()
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    data = writer.thinking("h") + writer.thinking("m") + writer.text("yes") + writer.tool_use(call)
    seen = [(item["type"].removeprefix("content_block_"), item["index"]) for item in sse_events(data)]
    thinking = [("start", 0), ("delta", 0), ("delta", 0), ("stop", 0)]
    assert seen == [*thinking, *[(kind, index) for index in (1, 2) for kind in ("start", "delta", "stop")]]
    assert writer.close() == b""
