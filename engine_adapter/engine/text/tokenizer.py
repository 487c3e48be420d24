"""Text to token ids and back, for one checkpoint.

Decides which ids end a text (the checkpoint's own list and the end-of-turn markers of its chat format) and
what an unpaired surrogate becomes. Invariant: `encode` accepts any Python string. It does not know chat
templates (`chat_template`) or partial output (`detokenizer`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from engine_adapter.engine.checkpoint.loader import ModelUnusable, read_json

# Checkpoints often list only <|endoftext|>, although their template ends a turn with one of these.
END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>")

BYTE_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet of bytes: printable Latin-1 stands for itself, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What the engine uses from the files beside `tokenizer.json`."""

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    adds_bos_token: bool


class Tokenizer:
    """The checkpoint's tokenizer. Thread-safe: it holds no state between calls."""

    def __init__(self, fast: FastTokenizer, files: TokenizerFiles, eos_token_ids: Sequence[int]) -> None:
        self._fast = fast
        self.files = files
        markers = (fast.token_to_id(token) for token in (*END_OF_TURN_TOKENS, files.eos_token or ""))
        self.stop_token_ids = frozenset(eos_token_ids) | {id_ for id_ in markers if id_ is not None}

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; may be less than the model's padded vocabulary."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids. Pass False for a rendered chat template: it contains its special tokens."""
        return list(self._fast.encode(well_formed(text), add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text; bytes that form no character become U+FFFD."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """The text of a single token, special tokens included, for log-probabilities."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text, even if they are only part of a character."""
        token = self._fast.id_to_token(token_id) or ""
        if self.is_byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        if BYTE_FALLBACK.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return self.token_text(token_id).encode("utf-8")

    @property
    def is_byte_level(self) -> bool:
        """Tokens are written in the byte-level alphabet (GPT-2's), not with byte fallback."""
        return "ByteLevel" in str(self._fast.decoder)

    def vocabulary(self, size: int) -> list[str]:
        """Every token as the vocabulary writes it, by id; special and unused ids are empty strings."""
        tokens = [""] * size
        for token, token_id in self._fast.get_vocab(with_added_tokens=True).items():
            if token_id < size:
                tokens[token_id] = token
        for token_id, added in self._fast.get_added_tokens_decoder().items():
            if added.special and token_id < size:
                tokens[token_id] = ""
        return tokens


def well_formed(text: str) -> str:
    """Replace unpaired surrogates, which UTF-8 cannot encode, by U+FFFD; join the paired ones."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def load_tokenizer(directory: Path | str, eos_token_ids: Sequence[int]) -> Tokenizer:
    """Read `tokenizer.json` and the files beside it.

    Raises:
        ModelUnusable: no `tokenizer.json`, or a broken one.
    """
    folder = Path(directory)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelUnusable(f"{folder} has no tokenizer.json: convert its tokenizer to the fast format first")
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelUnusable(f"{path} cannot be read: {error}") from error
    fast.no_truncation()  # some files still have the lengths of their training run
    fast.no_padding()
    return Tokenizer(fast, _read_files(folder), eos_token_ids)


def _read_files(folder: Path) -> TokenizerFiles:
    raw = read_json(folder / "tokenizer_config.json") or {}
    template = raw.get("chat_template")
    if isinstance(template, list):  # several named templates: the default one
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        template = separate.read_text(encoding="utf-8")
    return TokenizerFiles(
        chat_template=template if isinstance(template, str) else None,
        bos_token=_token_text(raw.get("bos_token")),
        eos_token=_token_text(raw.get("eos_token")),
        adds_bos_token=bool(raw.get("add_bos_token", False)),
    )


def _token_text(value: object) -> str | None:
    """A token is written as a string or as an object with its text under `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
