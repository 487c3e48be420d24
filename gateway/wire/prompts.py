"""Reduces a prompt to hashes of its system block and messages, and extracts how it begins.

Requests with the same system block form a prompt group. Requests whose hash chains begin alike share a prefix
that a backend may still have in its cache. Each hash of a chain is xxh3 seeded with the previous hash, so
equal hashes mean equal prefixes (to 64 bits: enough for placement, and a wrong guess costs only a cache
miss). A secret seed per tenant and model keeps outsiders from predicting or steering placement.

System blocks are large and repeat from request to request, so their hashes are cached under the hash of their
raw bytes; otherwise the normalisers alone would cost more than the rest of the request. The cache changes no
result. Invariant: no prompt text leaves this module. Knows nothing about session ids.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from gateway.values import Api, Message, PromptKey
from gateway.wire.bodies import Body
from gateway.wire.fingerprints import opening_of, stable_sentence
from gateway.wire.keys import KeyHasher, Scope, length_prefixed, to_bytes
from gateway.wire.normalise import TextNormaliser, canonical_message, content_texts, without_cache_control
from gateway.wire.settings import KeySettings

_OPENING_LENGTH: Final = 13
# How nearly every client's messages begin, in the two spellings of JSON writers. Other messages are decoded.
_ROLE_BY_OPENING: Final = {
    (b'{"role":%b"%b"' % (space, role.encode()))[:_OPENING_LENGTH]: role
    for role in ("system", "developer", "user", "assistant", "tool")
    for space in (b"", b" ")
}
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_OPENING_REACH: Final = 256  # a message's text begins within so many bytes
_MARKER: Final = b'"cache_control"'
_MARKER_REACH: Final = 96  # a cache marker on the last part of a message lies this close to its end
_MAX_MARKERS: Final = 4  # Anthropic's limit of cache breakpoints in one request
_LARGE_MESSAGE: Final = 16_384  # smaller messages are not searched for pictures
_ATTACHMENT_BYTES: Final = 4_096  # text that costs an engine about as much as one picture
_TEXT_BLOCK: Final = 2_048  # text without messages, and long messages, are matched in blocks of this size


class _Head(msgspec.Struct):
    role: str = ""
    type: str = ""
    content: msgspec.Raw = msgspec.Raw(b"")


_HEAD_DECODER: Final = msgspec.json.Decoder(_Head)


class SystemBlock(NamedTuple):
    """The hashes of a request's system prompt and tools."""

    prompt_key: PromptKey
    chain_hash: int
    stable: bytes  # hash of what stands for it in a fingerprint, whatever its clocks and counters say
    is_auxiliary: bool  # it asks for a title or the like


class Roles(msgspec.Struct, frozen=True, gc=False):
    """Who speaks in a list of messages, looked at only as far as needed."""

    num_read: int = 0
    num_system: int = 0  # at the beginning
    first_user: int | None = None
    has_answer: bool = False


class Progress(msgspec.Struct, frozen=True, gc=False):
    """What is known of a prompt up to the end of one of its turns, whatever follows.

    Reading on from here gives what reading from the first message gives.
    """

    roles: Roles
    system: SystemBlock | None
    chain_hash: int
    num_bytes: int
    prefix: tuple[Message, ...]
    num_turns: int
    opens_auxiliary: bool  # said only of a first turn that is also the last


class Prompt(msgspec.Struct, kw_only=True, gc=False):
    """The prompt of one request."""

    system: SystemBlock | None = None
    prefix: tuple[Message, ...] = ()
    num_bytes: int = 0
    opening: bytes = b""  # how the conversation began, see `fingerprints`; b"" where that does not tell yet
    opening_end: int = 0  # index of the message after it
    is_follow_up: bool = False
    is_auxiliary: bool = False
    progress: Progress | None = None  # where asked for; None: no turn that a longer prompt must hash alike
    num_unsettled: int = 0  # messages after that


class _Chain(msgspec.Struct, gc=False):
    """A chain while it is hashed."""

    end: int
    num_bytes: int
    prefix: list[Message]
    num_turns: int


class PromptReader:
    """Reads prompts of all dialects."""

    def __init__(self, settings: KeySettings, hasher: KeyHasher) -> None:
        self._hasher = hasher
        self._normaliser = TextNormaliser(settings.normalisers, ignores_dates=settings.ignores_dates)
        self._min_user_bytes = settings.fingerprint_min_bytes
        self._max_prefix = settings.max_prefix_messages
        self._auxiliary = settings.auxiliary_prompts
        in_json = [msgspec.json.encode(text)[1:-1].decode() for text in settings.auxiliary_prompts]
        self._auxiliary_json = re.compile(_any_of(in_json).encode())
        # at the beginning of a line: some clients put a text of their own first
        system = _any_of(settings.auxiliary_system_prompts)
        self._auxiliary_system = re.compile(f"^{system}", re.MULTILINE)
        self._memo: OrderedDict[int, SystemBlock | None] = OrderedDict()
        self._max_memo = settings.prompt_memo_entries

    def read(
        self, api: Api, body: Body, scope: Scope, *, wants_fingerprint: bool, wants_progress: bool = False
    ) -> Prompt:
        """Return the prompt of `body`, hashed for `scope`. Changes only the memo."""
        if body.messages is None:
            return self._read_text(body, scope)
        messages = list(map(bytes, body.messages))
        roles = _read_roles(messages, _NOBODY)
        num_system = 0 if api is Api.MESSAGES else roles.num_system
        system, turns = messages[:num_system], messages[num_system:]
        block = self._system_block(scope, body, system)
        prompt = Prompt(system=block, is_follow_up=roles.has_answer)
        chain = _Chain(scope.seed, 0, [], 0)
        if block is not None:
            chain.end = block.chain_hash
            chain.num_bytes = len(body.system) + len(body.tools) + sum(map(len, system))
            chain.prefix.append(Message(chain_hash=chain.end, num_bytes=chain.num_bytes))
        if not roles.has_answer:
            prompt.is_auxiliary = (block is not None and block.is_auxiliary) or (
                len(turns) == 1 and self._is_auxiliary(turns[0])
            )
        if wants_fingerprint and roles.first_user is not None:
            parts, prompt.opening_end = opening_of(messages, roles.first_user, _role_of, self._min_user_bytes)
            prompt.opening = length_prefixed(*parts)
        before = Roles(num_system, num_system)
        return self._read_turns(prompt, chain, turns, before, wants_progress=wants_progress)

    def read_on(self, since: Progress, body: Body, *, wants_progress: bool) -> Prompt:
        """Return the prompt that goes on from `since` with the messages of `body`, without its opening."""
        turns = list(map(bytes, body.messages or []))
        roles = _read_roles(turns, since.roles)
        prompt = Prompt(system=since.system, is_follow_up=roles.has_answer)
        prompt.is_auxiliary = (since.opens_auxiliary and not turns) or (
            not roles.has_answer and since.system is not None and since.system.is_auxiliary
        )
        chain = _Chain(since.chain_hash, since.num_bytes, list(since.prefix), since.num_turns)
        return self._read_turns(prompt, chain, turns, since.roles, wants_progress=wants_progress)

    def _read_turns(
        self, prompt: Prompt, chain: _Chain, turns: list[bytes], before: Roles, *, wants_progress: bool
    ) -> Prompt:
        """Hash the rest of a prompt. Changes and returns `prompt`."""
        num_turns = len(turns)
        num_settled = _num_settled(turns) if wants_progress else 0
        if num_settled:
            self._extend(chain, turns[:num_settled], num_settled)
            roles = _read_roles(turns[:num_settled], before)
            prefix = tuple(chain.prefix)
            # a first turn with others behind it may be asked for alone
            opens_auxiliary = prompt.is_auxiliary or (chain.num_turns == 1 and self._is_auxiliary(turns[0]))
            prompt.progress = Progress(
                roles, prompt.system, chain.end, chain.num_bytes, prefix, chain.num_turns, opens_auxiliary
            )
            prompt.num_unsettled = num_turns - num_settled
            prompt.prefix = prefix
            turns = turns[num_settled:]
        if turns or not num_settled:
            self._extend(chain, turns, num_turns - num_settled - _MAX_MARKERS)
            prompt.prefix = tuple(chain.prefix)
        prompt.num_bytes = chain.num_bytes
        return prompt

    def _is_auxiliary(self, turn: bytes) -> bool:
        """Whether the only turn of a prompt begins like an auxiliary prompt."""
        opening = turn[:_OPENING_REACH]
        if not self._auxiliary_json.search(opening):
            return False  # avoids decoding most first turns
        return _text_of(turn).startswith(self._auxiliary)

    def _extend(self, chain: _Chain, turns: list[bytes], marked_from: int) -> None:
        """Hash each turn into the chain; cache markers are looked for from turn `marked_from` on."""
        room = max(0, self._max_prefix - chain.num_turns)
        prefix = chain.prefix
        end = chain.end
        total = 0
        for index, turn in enumerate(turns[:room]):
            size = len(turn)
            if index >= marked_from and turn.rfind(_MARKER, -_MARKER_REACH) >= 0:
                turn = canonical_message(turn)
            elif size > _LARGE_MESSAGE:
                size -= _attachment_excess(turn)
            total += size
            if size <= _TEXT_BLOCK or size < len(turn):
                end = xxh3_64_intdigest(turn, end)
                prefix.append(Message(chain_hash=end, num_bytes=size))
            else:  # two long messages may share a document and then part: match them in blocks
                end = _chain_blocks(prefix, end, turn, self._max_prefix)
        chain.end = end
        if len(turns) > room:
            total += sum(map(len, turns[room:]))
        chain.num_bytes += total
        chain.num_turns += len(turns)

    def _read_text(self, body: Body, scope: Scope) -> Prompt:
        """Read a prompt without messages in fixed blocks from its start; the last block may be short."""
        block = self._system_block(scope, body, [])
        text = body.text
        prefix = []
        if block is not None:
            prefix.append(Message(chain_hash=block.chain_hash, num_bytes=len(body.system) + len(body.tools)))
        _chain_blocks(prefix, scope.seed if block is None else block.chain_hash, text, self._max_prefix)
        num_bytes = len(body.system) + len(body.tools) + len(text)
        return Prompt(system=block, prefix=tuple(prefix), num_bytes=num_bytes)

    def _system_block(self, scope: Scope, body: Body, messages: list[bytes]) -> SystemBlock | None:
        if not (messages or body.system or body.tools):
            return None
        # The seed is secret, so a collision inside one scope is pure chance, 1 in 2^64.
        memo_key = xxh3_64_intdigest(body.tools, scope.seed)
        memo_key = xxh3_64_intdigest(body.system, memo_key)
        for message in messages:
            memo_key = xxh3_64_intdigest(message, memo_key)
        memo = self._memo
        if memo_key in memo:
            memo.move_to_end(memo_key)
            return memo[memo_key]
        block = self._hash_system(scope, body, messages)
        memo[memo_key] = block
        if len(memo) > self._max_memo:
            memo.popitem(last=False)
        return block

    def _hash_system(self, scope: Scope, body: Body, messages: list[bytes]) -> SystemBlock | None:
        """Hash the texts in the order in which a chat template renders them: top-level, then messages."""
        texts = content_texts(body.system)
        for message in messages:
            texts += content_texts(bytes(_decode_head(message).content))
        kept = [text for text in map(self._normaliser.normalise, texts) if text.strip()]
        tools = without_cache_control(body.tools)
        if tools in (b"null", b"[]"):
            tools = b""
        if not (kept or tools):
            return None
        parts = length_prefixed(tools, *map(to_bytes, kept))
        key = PromptKey(self._hasher.hex_key(b"prompt:", scope, parts))
        stable = xxh3_128_digest(length_prefixed(*stable_sentence(kept, tools)), scope.seed)
        is_auxiliary = any(map(self._auxiliary_system.search, texts))
        return SystemBlock(key, xxh3_64_intdigest(parts, scope.seed), stable, is_auxiliary)


def _chain_blocks(prefix: list[Message], chain: int, text: bytes, max_prefix: int) -> int:
    """Add `text` to the prefix in fixed blocks (the last may be short). Returns the chain's new end."""
    for start in range(0, len(text), _TEXT_BLOCK):
        if len(prefix) > max_prefix:
            break
        block = text[start : start + _TEXT_BLOCK]
        chain = xxh3_64_intdigest(block, chain)
        prefix.append(Message(chain_hash=chain, num_bytes=len(block)))
    return chain


_NOBODY: Final = Roles()


def _is_marked(turn: bytes) -> bool:
    return turn.rfind(_MARKER, -_MARKER_REACH) >= 0


def _num_settled(turns: list[bytes]) -> int:
    """Return how many of the turns are hashed as they are, however many turns follow or are taken away again.

    A marker counts only in the last `_MAX_MARKERS` turns. So a marked turn, which a longer prompt hashes in
    another way, must not be among the settled ones that the end of a prompt can still come close to:

        … raw, whatever they hold │ _MAX_MARKERS turns without a marker ┊ unsettled, from a marked turn on
                                                            num_settled ┘
    """
    settled = len(turns)
    for index in range(settled - 1, -1, -1):
        if _is_marked(turns[index]):
            settled = index
        elif settled - index == _MAX_MARKERS:
            break
    return settled


def _any_of(texts: Iterable[str]) -> str:
    """Return an expression for any of these texts."""
    return f"(?:{'|'.join(map(re.escape, texts)) or '(?!)'})"


def _read_roles(messages: list[bytes], before: Roles) -> Roles:
    """Return the roles of a list that goes on with `messages`."""
    num_read, num_system = before.num_read, before.num_system
    first_user, has_answer = before.first_user, before.has_answer
    for index, message in enumerate(messages, num_read):
        if has_answer and first_user is not None:
            break
        role = _ROLE_BY_OPENING.get(message[:_OPENING_LENGTH]) or _role_of(message)
        if role == "user":
            if first_user is None:
                first_user = index
        elif role not in _SYSTEM_ROLES:
            has_answer = True
        elif num_system == index:
            num_system += 1
    return Roles(num_read + len(messages), num_system, first_user, has_answer)


def _role_of(message: bytes) -> str:
    """Return the role of a message, or the type of an item without a role (Responses: function calls)."""
    role = _ROLE_BY_OPENING.get(message[:_OPENING_LENGTH])
    if role is not None:
        return role
    head = _decode_head(message)
    return head.role or ("user" if head.type in ("", "message") else head.type)


def _decode_head(message: bytes) -> _Head:
    try:
        return _HEAD_DECODER.decode(message)
    except (msgspec.DecodeError, RecursionError):
        return _Head()


def _text_of(message: bytes) -> str:
    """Return the first text of a message."""
    texts = content_texts(bytes(_decode_head(message).content))
    return texts[0] if texts else ""


def _attachment_excess(message: bytes) -> int:
    """Return how many bytes of a message are base64 data that costs no tokens.

    Text has a space in almost any 512 bytes and base64 has none, so three samples show whether searching the
    whole message is worthwhile. O(1) for text, O(len) otherwise.
    """
    samples = (message[at : at + 512] for at in (len(message) // 4, len(message) // 2, len(message) * 3 // 4))
    if all(b" " in sample for sample in samples):
        return 0
    rest = message
    for opening in (b";base64,", b'"data":"', b'"data": "'):
        rest = _without_values(rest, opening)  # the next form searches only what is left
    return len(message) - len(rest)


def _without_values(message: bytes, opening: bytes) -> bytes:
    """Shorten the text between each `opening` and the next quote to `_ATTACHMENT_BYTES`."""
    kept = []
    begin = 0
    start = message.find(opening)
    while start >= 0:
        value = start + len(opening)
        end = message.find(b'"', value)
        if end - value > _ATTACHMENT_BYTES:
            kept.append(message[begin : value + _ATTACHMENT_BYTES])
            begin = end
        start = message.find(opening, max(end, value))
    return message if not kept else b"".join([*kept, message[begin:]])
