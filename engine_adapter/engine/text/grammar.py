"""Constrains answers to JSON, a JSON schema, a regular expression or a choice.

xgrammar compiles the grammars and says at each step which tokens may follow. This module adds one rule:
special tokens other than stop tokens are never allowed, because inside a JSON string they would look like
text and act like a new turn. xgrammar is an optional dependency and slow to import, so it is loaded by the
first request that needs it. Compiling may take seconds: call it off the event loop.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine_adapter.engine.text.tokenizer import Tokenizer

ANY_OBJECT = '{"type": "object"}'
# With free white space a small model may write blanks up to its limit; the compact form always advances.
COMPACT = {"any_whitespace": False}
_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time and source line of xgrammar
MAX_SOURCE_CHARACTERS = 128 * 1024


class GrammarUnavailable(Exception):
    """xgrammar is not installed."""


class GrammarInvalid(ValueError):
    """The schema or pattern cannot be compiled; the message says why."""


def _bounded(source: str) -> str:
    """Return the source, unless it is so large that compiling it would stall the worker."""
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise GrammarInvalid(f"{len(source)} characters are more than the limit of {MAX_SOURCE_CHARACTERS}")
    return source


class Grammar:
    """One compiled grammar; a `TokenConstraintSource`."""

    def __init__(self, compiled: Any, xgrammar: Any) -> None:
        self._compiled = compiled
        self._xgrammar = xgrammar

    def start(self) -> GrammarMatcher:
        """Return a matcher at the start of a new text."""
        return GrammarMatcher(self._xgrammar.GrammarMatcher(self._compiled), self._xgrammar)


class GrammarMatcher:
    """The position of one text in its grammar; a `TokenConstraint`."""

    def __init__(self, matcher: Any, xgrammar: Any) -> None:
        self._matcher = matcher
        self._apply = xgrammar.apply_token_bitmask_inplace
        self._allocate = xgrammar.allocate_token_bitmask
        self._bitmask: torch.Tensor | None = None

    def mask_logits(self, row: torch.Tensor) -> None:
        """Forbid tokens that cannot follow. Changes: the row `(1, vocab)`."""
        if self._matcher.is_terminated():
            return
        if self._bitmask is None:
            self._bitmask = self._allocate(1, row.shape[-1])
        self._matcher.fill_next_token_bitmask(self._bitmask)
        self._apply(row, self._bitmask.to(row.device))

    def accept(self, token_id: int) -> None:
        """Advance past a token that the mask has allowed."""
        if not self._matcher.is_terminated():
            self._matcher.accept_token(token_id)


class GrammarCompiler:
    """Compiles for one tokenizer; xgrammar caches compiled grammars, within a limit."""

    CACHE_BYTES = 64 * 2**20

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._loading = threading.Lock()  # compilations run on several threads
        self._loaded: tuple[Any, Any] | None = None

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self._compile(lambda compiler: compiler.compile_json_schema(ANY_OBJECT, **COMPACT))

    def json_schema(self, schema: object) -> Grammar:
        """JSON that fits a schema."""
        text = _bounded(json.dumps(schema))
        return self._compile(lambda compiler: compiler.compile_json_schema(text, **COMPACT))

    def regex(self, pattern: str) -> Grammar:
        """Text that matches a pattern as a whole."""
        _bounded(pattern)
        return self._compile(lambda compiler: compiler.compile_regex(pattern))

    def choice(self, options: Sequence[str]) -> Grammar:
        """One of the given texts."""
        rule = _bounded(" | ".join(json.dumps(option) for option in options))
        return self._compile(lambda compiler: compiler.compile_grammar(f"root ::= {rule}"))

    def _compile(self, build: Callable[[Any], Any]) -> Grammar:
        xgrammar, compiler = self._load()
        try:
            return Grammar(build(compiler), xgrammar)
        except (RuntimeError, ValueError, TypeError) as error:
            lines = [line for line in str(error).strip().splitlines() if line]
            reason = _LOG_PREFIX.sub("", lines[-1]) if lines else "cannot be compiled"
            raise GrammarInvalid(reason) from error

    def _load(self) -> tuple[Any, Any]:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._make_compiler()
            return self._loaded

    def _make_compiler(self) -> tuple[Any, Any]:
        try:
            import xgrammar
        except ImportError as error:
            raise GrammarUnavailable(
                "structured output needs xgrammar: pip install homing[grammar]"
            ) from error
        info = xgrammar.TokenizerInfo(
            self._tokenizer.vocabulary(self._vocab_size),
            vocab_type=(
                xgrammar.VocabType.BYTE_LEVEL
                if self._tokenizer.is_byte_level
                else xgrammar.VocabType.BYTE_FALLBACK
            ),
            vocab_size=self._vocab_size,
            stop_token_ids=sorted(self._tokenizer.stop_token_ids),
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=self.CACHE_BYTES)
        return xgrammar, compiler
