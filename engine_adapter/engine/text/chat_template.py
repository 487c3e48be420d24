"""Renders messages with the checkpoint's chat template.

Decides how OpenAI's message shapes are reduced to what Hugging Face templates expect: content parts are
joined to a string, missing content becomes an empty one, tool-call arguments become objects, and `developer`
becomes `system` if the template does not know it. Templates come with checkpoints and are code: they run in
jinja's immutable sandbox, with the same extensions and globals as in transformers. Invariant: rendering is a
pure function of its arguments, unless the template asks for today's date. It does not know token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_adapter.engine.checkpoint.loader import ModelUnusable
from engine_adapter.engine.text.tokenizer import TokenizerFiles

Message = Mapping[str, object]

# For checkpoints without a template: the most common format, and that of our default model.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class MessagesUnsuitable(ValueError):
    """These messages cannot be rendered by this checkpoint's template; the message says why."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.source = files.chat_template or CHATML
        self._special = {"bos_token": files.bos_token or "", "eos_token": files.eos_token or ""}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
        try:
            self._template = environment.from_string(self.source)
        except TemplateError as error:
            raise ModelUnusable(f"the checkpoint's chat template does not compile: {error}") from error

    @property
    def knows_tools(self) -> bool:
        """The template shows tool definitions to the model."""
        return "tools" in self.source

    @property
    def has_thinking_switch(self) -> bool:
        """The template can switch the model's reasoning on and off, as Qwen3's can."""
        return "enable_thinking" in self.source

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt text, special tokens included.

        Raises:
            MessagesUnsuitable: the template refuses these messages, or fails on them.
        """
        reduced = [self._reduce(message) for message in messages]
        context = {**self._special, **(variables or {})}
        context |= {"messages": reduced, "tools": list(tools) if tools else None}
        context["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(context)
        except SecurityError as error:
            raise MessagesUnsuitable(f"the sandbox stopped the chat template: {error}") from error
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise MessagesUnsuitable(f"the chat template refuses these messages: {error}") from error

    def _reduce(self, message: Message) -> dict[str, object]:
        reduced = {key: value for key, value in message.items() if value is not None}
        if reduced.get("role") == "developer" and "developer" not in self.source:
            reduced["role"] = "system"
        reduced["content"] = _content_text(message.get("content"))
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            reduced["tool_calls"] = [_reduce_call(call) for call in calls]
        return reduced


def _content_text(content: object) -> str:
    """Join the text parts; this model cannot read any others."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MessagesUnsuitable("message content must be a string or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise MessagesUnsuitable(
                f"content part of type {kind!r} is not supported: this model reads text only"
            )
        texts.append(text)
    return "".join(texts)


def _reduce_call(call: object) -> object:
    """Parse the arguments: OpenAI sends them as JSON text, templates expect an object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:
            function["arguments"] = {}
    return {**call, "function": function}


def _to_json(value: object, indent: int | None = None) -> str:
    """As in transformers: no HTML escaping, non-ASCII text unchanged."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
