"""Chat and text completions over real HTTP against a tiny model: shapes, streams, usage, reuse."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine.worker_app import Worker, running_worker, sse_events
from fakes.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[Worker]:
    async with running_worker(checkpoint) as running:
        yield running


async def test_a_chat_answer_has_openai_shape(worker: Worker) -> None:
    """All fields that clients read are there, cached_tokens as an explicit zero included."""
    response = await worker.chat()
    answer = await response.json()
    assert response.status == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert set(answer["homing"]) == {"queue_ms", "prefill_ms", "decode_ms", "cached_tokens_by_tier"}
    assert answer["homing"]["cached_tokens_by_tier"] == {"device": 0, "host": 0, "disk": 0}


async def test_the_stream_joins_to_the_whole_answer(worker: Worker) -> None:
    """Role first, then text, a finish reason, the usage where asked, [DONE]; the text is the whole one's."""
    whole = (await (await worker.chat(max_tokens=24)).json())["choices"][0]
    response = await worker.chat(max_tokens=24, stream=True, stream_options={"include_usage": True})
    *chunks, last = sse_events(await response.read())
    assert last == "[DONE]"
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == whole["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_a_stream_without_usage_has_none(worker: Worker) -> None:
    """Nobody gets a usage chunk that did not ask for it."""
    *chunks, last = sse_events(await (await worker.chat(stream=True)).read())
    assert last == "[DONE]"
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_the_second_turn_reuses_the_first(worker: Worker) -> None:
    """Cached tokens grow with the history and stay below the prompt; the answer equals a cold one."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    cached = []
    for turn in range(3):
        answer = await (await worker.chat(messages=history)).json()
        usage = answer["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[-1] < usage["prompt_tokens"]
        cold = await (await worker.chat(messages=history, cache_salt=f"other-{turn}")).json()
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert cold["choices"] == answer["choices"]
        history += [answer["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
    assert cached[0] == 0
    assert 0 < cached[1] < cached[2]


async def test_the_same_prompt_again_still_computes_its_last_token(worker: Worker) -> None:
    """A full hit reports fewer cached tokens than the prompt has."""
    first = (await (await worker.chat()).json())["usage"]
    again = (await (await worker.chat()).json())["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert first["prompt_tokens"] - 4 <= cached <= first["prompt_tokens"] - 1


async def test_n_choices_are_numbered_and_differ(worker: Worker) -> None:
    """n=3 gives three choices that share the prompt's cost; a seed repeats all of them."""
    fields = {"n": 3, "temperature": 2, "seed": 11, "max_tokens": 12}
    answer = await (await worker.chat(**fields)).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 36
    again = await (await worker.chat(**fields)).json()
    assert [choice["message"]["content"] for choice in again["choices"]] == texts


async def test_streamed_choices_interleave_but_join_alike(worker: Worker) -> None:
    """Each choice of a stream opens with its role and joins to the text of the whole answer."""
    fields = {"n": 2, "temperature": 2, "seed": 3, "max_tokens": 9}
    whole = await (await worker.chat(**fields)).json()
    *chunks, _ = sse_events(await (await worker.chat(stream=True, **fields)).read())
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]


async def test_a_stop_string_ends_the_text_before_it(worker: Worker) -> None:
    """finish_reason is stop, the string is not shown, and the engine computes no further."""
    text = (await (await worker.chat(max_tokens=40)).json())["choices"][0]["message"]["content"]
    stop = text[5:7]
    response = await worker.chat(max_tokens=40, stop=[stop, "never"])
    answer = await response.json()
    assert answer["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 40


async def test_a_stop_token_is_counted_but_not_shown(worker: Worker) -> None:
    """A stop token id ends the answer; its text does not appear."""
    fields = {"max_tokens": 40, "logit_bias": {str(token_id): 60 for token_id in range(40, 90)}}
    text = (await (await worker.chat(**fields)).json())["choices"][0]["message"]["content"]
    ids = (await (await worker.client.post("/tokenize", json={"prompt": text})).json())["tokens"]
    answer = await (await worker.chat(**fields, stop_token_ids=[ids[20]])).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == text[: ids.index(ids[20])]
    assert answer["usage"]["completion_tokens"] == ids.index(ids[20]) + 1


async def test_the_models_own_end_needs_no_asking(worker: Worker) -> None:
    """The end-of-turn id stops a chat, unless ignore_eos is set; it is never shown."""
    fields = {"max_tokens": 3, "logit_bias": {"257": 100}}
    ended = await (await worker.chat(**fields, ignore_eos=False)).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == 1
    ignored = await (await worker.chat(**fields)).json()
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ended["choices"][0]["message"]["content"] == ignored["choices"][0]["message"]["content"] == ""


async def test_chat_logprobs(worker: Worker) -> None:
    """One entry per token, greedy's own on top, alternatives sorted, bytes given."""
    answer = await (await worker.chat(logprobs=True, top_logprobs=3)).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 5
    for entry in entries:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]


async def test_completion_prompts_in_all_forms(worker: Worker) -> None:
    """Text, ids, a list of texts and a list of ids continue alike, numbered prompt by prompt."""
    ids = (await (await worker.client.post("/tokenize", json={"prompt": "abc"})).json())["tokens"]
    single = (await (await worker.complete("abc")).json())["choices"][0]["text"]
    assert (await (await worker.complete(ids)).json())["choices"][0]["text"] == single
    for many in (["abc", "xyz"], [ids, ids]):
        answer = await (await worker.complete(many, n=2)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["choices"][0]["text"] == answer["choices"][1]["text"] == single
        assert answer["usage"]["prompt_tokens"] == 6
        assert answer["usage"]["completion_tokens"] == 20


async def test_completion_echo_and_logprobs(worker: Worker) -> None:
    """echo puts the prompt in front; logprobs come as parallel lists with offsets into the text."""
    plain = (await (await worker.complete("abc")).json())["choices"][0]["text"]
    echoed = (await (await worker.complete("abc", echo=True)).json())["choices"][0]["text"]
    assert echoed == "abc" + plain
    logprobs = (await (await worker.complete("abc", logprobs=2)).json())["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 5
    assert logprobs["text_offset"][0] == 0


async def test_completion_stream_joins_with_echo(worker: Worker) -> None:
    """The echoed prompt comes once, in the first chunk of its choice."""
    whole = (await (await worker.complete("abc", echo=True, max_tokens=20)).json())["choices"][0]["text"]
    *chunks, last = sse_events(
        await (await worker.complete("abc", echo=True, max_tokens=20, stream=True)).read()
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert last == "[DONE]"


async def test_completions_default_to_sixteen_tokens(worker: Worker) -> None:
    """As OpenAI's endpoint does."""
    answer = await (await worker.complete(max_tokens=None)).json()
    assert answer["usage"]["completion_tokens"] == 16


async def test_list_content_equals_string_content(worker: Worker) -> None:
    """Text parts and a string give the same prompt, so the second is a hit."""
    await worker.chat("some words")
    parts = [{"type": "text", "text": "some "}, {"type": "text", "text": "words"}]
    usage = (await (await worker.chat(parts)).json())["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


async def test_tokenize_and_detokenize_are_inverse(worker: Worker) -> None:
    """Ids of a text give the text back; messages are counted as a chat would."""
    tokens = (await (await worker.client.post("/tokenize", json={"prompt": "héllo"})).json())["tokens"]
    back = await (await worker.client.post("/detokenize", json={"tokens": tokens})).json()
    assert back == {"prompt": "héllo"}
    messages = [{"role": "user", "content": "hello"}]
    count = (await (await worker.client.post("/tokenize", json={"messages": messages})).json())["count"]
    assert count == (await (await worker.chat()).json())["usage"]["prompt_tokens"]


async def test_models_and_aliases(worker: Worker) -> None:
    """Each served name is listed, found by id (slashes included) and accepted in requests."""
    listed = await (await worker.client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "alias/of tiny"]
    card = await (await worker.client.get("/v1/models/alias/of%20tiny")).json()
    assert card["id"] == "alias/of tiny"
    assert card["max_model_len"] == 2048
    assert (await worker.chat(model="alias/of tiny")).status == 200


async def test_request_ids_are_echoed_when_safe(worker: Worker) -> None:
    """A caller's id comes back; one that is no header text is replaced."""
    echoed = await worker.client.get("/version", headers={"X-Request-Id": "abc-1"})
    assert echoed.headers["X-Request-Id"] == "abc-1"
    replaced = await worker.client.get("/version", headers={"X-Request-Id": "x" * 300})
    assert len(replaced.headers["X-Request-Id"]) == 32


async def test_metrics_add_up_and_follow_the_requests(worker: Worker) -> None:
    """Block states add up to the total; token counters move by what usage says; nothing is live when idle."""
    await worker.chat()
    await worker.chat()
    page = await (await worker.client.get("/metrics")).text()
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line[0] != "#"
    }
    blocks = {key: value for key, value in values.items() if key.startswith("homing_worker_kv_blocks")}
    assert sum(blocks.values()) == 512
    assert values['homing_worker_kv_blocks{state="used"}'] == 0
    assert values['homing_worker_kv_blocks{state="cached"}'] > 0
    assert values['vllm:generation_tokens_total{model_name="tiny"}'] == 10
    assert values['vllm:request_success_total{finished_reason="length",model_name="tiny"}'] == 2
    assert values['vllm:prompt_tokens_cached_total{model_name="tiny"}'] > 0
    assert values['vllm:time_to_first_token_seconds_count{model_name="tiny"}'] == 2
    assert 'vllm:cache_config_info{block_size="4",num_gpu_blocks="512"}' in values
