"""Builds chat answers from pieces of text, whole or streamed.

Decides the shape of chat answers. A stream opens each choice with the role, carries text and tool calls,
ends each choice with its finish reason, then the usage where asked, then `[DONE]`. Both shapes read tool
calls and reasoning with the same parsers, so they always agree. It does not know how text is made nor what
was asked.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from engine_adapter.engine.text.reasoning import ReasoningParser, ReasoningPlace
from engine_adapter.engine.text.tokenizer import Tokenizer
from engine_adapter.engine.text.tool_calls import ToolCall, ToolCallFormat, ToolCallParser
from engine_adapter.server.accounting import accounted_pieces, usage_of
from engine_adapter.server.event_stream import DONE, event
from engine_adapter.server.generation import Generation, Piece, ShownToken
from engine_adapter.server.logprobs import chat_logprobs
from engine_adapter.server.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """What all chunks of one answer share."""

    response_id: str
    created: int
    model: str
    wants_logprobs: bool
    wants_usage: bool
    tool_format: ToolCallFormat | None
    reasoning_place: ReasoningPlace

    def document(self, kind: str, **fields: object) -> dict[str, object]:
        head = {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece, with reasoning and tool calls separated from its text."""

    index: int
    reasoning: str
    text: str
    calls: list[dict[str, object]]
    tokens: Sequence[ShownToken]
    finish_reason: str | None
    stop_string: str | None


@dataclass(slots=True, kw_only=True)
class ChoiceReader:
    """Separates reasoning and tool calls from one choice's text; numbers the calls."""

    parser: ToolCallParser | None
    reasoning_parser: ReasoningParser
    num_calls: int = 0

    def read(self, piece: Piece) -> Part:
        """Changes: the parsers' state and the count."""
        reasoning, text = self.reasoning_parser.push(piece.text)
        if piece.finish_reason is not None:
            last_reasoning, last_text = self.reasoning_parser.flush()
            reasoning, text = reasoning + last_reasoning, text + last_text
        found: list[str | ToolCall] = [text]
        if self.parser is not None:
            found = self.parser.push(text)
            if piece.finish_reason is not None:
                found += self.parser.flush()
        calls = [self._numbered(item) for item in found if isinstance(item, ToolCall)]
        reason = piece.finish_reason
        return Part(
            index=piece.index,
            reasoning=reasoning,
            text="".join(item for item in found if isinstance(item, str)),
            calls=calls,
            tokens=piece.tokens,
            finish_reason="tool_calls" if reason == "stop" and self.num_calls else reason,
            stop_string=piece.stop_string,
        )

    def _numbered(self, call: ToolCall) -> dict[str, object]:
        self.num_calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        head = {"index": self.num_calls - 1, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        return {**head, "function": function}


async def read_parts(
    metrics: WorkerMetrics,
    generation: Generation,
    tool_format: ToolCallFormat | None,
    reasoning_place: ReasoningPlace = ReasoningPlace.NOWHERE,
) -> AsyncGenerator[Part, None]:
    """Yield the generation's pieces as parts. Use under `contextlib.aclosing`."""
    readers: dict[int, ChoiceReader] = {}
    async with contextlib.aclosing(accounted_pieces(metrics, generation, "messages")) as pieces:
        async for piece in pieces:
            if piece.index not in readers:
                parser = ToolCallParser(tool_format) if tool_format is not None else None
                readers[piece.index] = ChoiceReader(
                    parser=parser, reasoning_parser=ReasoningParser(reasoning_place)
                )
            yield readers[piece.index].read(piece)


@dataclass(slots=True, kw_only=True)
class WholeChoice:
    """One complete choice."""

    index: int
    reasoning: str = ""
    text: str = ""
    calls: list[dict[str, object]] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None


async def collect_choices(
    metrics: WorkerMetrics,
    generation: Generation,
    tool_format: ToolCallFormat | None,
    reasoning_place: ReasoningPlace = ReasoningPlace.NOWHERE,
) -> list[WholeChoice]:
    """Run the generation to its end; return its choices."""
    choices: dict[int, WholeChoice] = {}
    async with contextlib.aclosing(read_parts(metrics, generation, tool_format, reasoning_place)) as parts:
        async for part in parts:
            choice = choices.setdefault(part.index, WholeChoice(index=part.index))
            choice.reasoning += part.reasoning
            choice.text += part.text
            choice.calls += part.calls
            choice.tokens += part.tokens
            choice.finish_reason, choice.stop_string = part.finish_reason, part.stop_string
    return [choices[index] for index in sorted(choices)]


async def whole_answer(
    metrics: WorkerMetrics, tokenizer: Tokenizer, generation: Generation, style: AnswerStyle
) -> dict[str, object]:
    """The `chat.completion` object."""
    entries = []
    for choice in await collect_choices(metrics, generation, style.tool_format, style.reasoning_place):
        message: dict[str, object] = {"role": "assistant", "content": choice.text}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in choice.calls]
        logprobs = chat_logprobs(tokenizer, choice.tokens) if style.wants_logprobs else None
        entries.append(
            {
                "index": choice.index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
            }
        )
    stats = generation.stats
    return style.document("chat.completion", choices=entries, usage=usage_of(stats), homing=stats.extension())


async def answer_events(
    metrics: WorkerMetrics, tokenizer: Tokenizer, generation: Generation, style: AnswerStyle
) -> AsyncGenerator[bytes, None]:
    """Yield the `chat.completion.chunk` events, joined for each step of the engine."""
    extra: dict[str, object] = {"usage": None} if style.wants_usage else {}

    def chunk(index: int, delta: dict[str, object], **choice: object) -> bytes:
        entry = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
        return event(style.document("chat.completion.chunk", choices=[entry], **extra))

    opened: set[int] = set()
    read = read_parts(metrics, generation, style.tool_format, style.reasoning_place)
    async with contextlib.aclosing(read) as parts:
        async for part in parts:
            data = b""
            if part.index not in opened:
                opened.add(part.index)
                data += chunk(part.index, {"role": "assistant", "content": ""})
            if part.reasoning:
                data += chunk(part.index, {"reasoning_content": part.reasoning})
            if part.text or (part.tokens and style.wants_logprobs):
                logprobs = chat_logprobs(tokenizer, part.tokens) if style.wants_logprobs else None
                data += chunk(part.index, {"content": part.text}, logprobs=logprobs)
            if part.calls:
                data += chunk(part.index, {"tool_calls": part.calls})
            if part.finish_reason is not None:
                data += chunk(part.index, {}, finish_reason=part.finish_reason)
            if data:
                yield data
    if style.wants_usage:
        stats = generation.stats
        yield event(
            style.document(
                "chat.completion.chunk", choices=[], usage=usage_of(stats), homing=stats.extension()
            )
        )
    yield DONE
