"""The request facts that the wire would give for each turn of a trace. It knows no routing."""

from __future__ import annotations

from hashlib import blake2b

from gateway.replay.trace import BYTES_PER_TOKEN, Trace
from gateway.values import Api, KeySource, PromptKey, RequestFacts, SessionKey


def facts_of(trace: Trace, *, uses_sessions: bool = True) -> list[RequestFacts]:
    """Return the facts of each turn; without sessions if clients send no session id."""

    def digest(text: str) -> str:
        return blake2b(text.encode(), digest_size=16).hexdigest()

    found = []
    sessions: dict[int, SessionKey] = {}
    prompts: dict[int, PromptKey] = {}
    for turn in trace.turns:
        key = sessions.setdefault(turn.session, SessionKey(digest(f"session {turn.session}")))
        prompt: PromptKey | None = None
        if turn.num_system_messages:
            last = turn.chain[turn.num_system_messages - 1].chain_hash
            prompt = prompts.setdefault(last, PromptKey(digest(f"prompt {last}")))
        source = KeySource.HEADER if uses_sessions else KeySource.NONE
        found.append(
            RequestFacts(
                api=Api.CHAT,
                is_stream=True,
                session_key=key if uses_sessions else None,
                prompt_key=prompt,
                key_source=source,
                prefix=turn.chain,
                num_prompt_bytes=turn.prompt_tokens * BYTES_PER_TOKEN,
                is_follow_up=turn.turn > 0,
            )
        )
    return found
