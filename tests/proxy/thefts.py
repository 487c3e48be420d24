"""What one tenant sends to learn what another has sent, and how to see what was found in a cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

KEYS = {"a": "key-of-tenant-a-0001", "b": "key-of-tenant-b-0001"}
SECRET = "a secret that only tenant a may know. " * 8
CHAT = [{"role": "user", "content": SECRET}]
DIALECTS = ("chat", "completions", "messages", "responses")
MANY_TOKENS = 250  # of the secret; what is cached of it


def request(model: str, tokens: list[int], dialect: str, **fields: Any) -> tuple[str, bytes]:
    """The secret in this dialect, as these tokens: its path and body."""
    path, body = {
        "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}),
        "completions": ("/v1/completions", {"prompt": tokens, "max_tokens": 2}),
        "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 2}),
        "responses": ("/v1/responses", {"input": SECRET, "max_output_tokens": 2}),
    }[dialect]
    return path, json.dumps({"model": model, **body, **fields}).encode()


def cached_tokens(answer: httpx.Response) -> int:
    """What any dialect tells in its usage, whole or streamed; a refused request found nothing."""
    if answer.status_code in (400, 403, 404, 405, 415, 422, 426):
        return 0
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return _found(answer.json())
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return max(_found(json.loads(event)) for event in events)


def _found(value: Any) -> int:
    """The largest count of cached tokens anywhere in it."""
    if isinstance(value, list):
        return max(map(_found, value), default=0)
    if not isinstance(value, dict):
        return 0
    counts = [value.get(name) or 0 for name in ("cached_tokens", "cache_read_input_tokens")]
    return max(*counts, *map(_found, value.values())) if value else 0


Change = Callable[[str, bytes], bytes]
"""Of a body, for who has got hold of the other tenant's salt."""


def ahead(text: str) -> Change:
    """Put these members first; `SALT` is the stolen one."""
    return lambda salt, body: b"{%b,%b" % (text.replace("SALT", salt).encode(), body[1:])


def behind(text: str) -> Change:
    """Put these members last."""
    return lambda salt, body: b"%b,%b}" % (body[:-1], text.replace("SALT", salt).encode())


STOLEN = behind('"cache_salt":"SALT"')
CHOSEN_SALTS: dict[str, Change] = {
    "none": lambda _, body: body,
    "first": ahead('"cache_salt":"SALT"'),
    "last": STOLEN,
    "twice": lambda salt, body: behind('"cache_salt":"SALT"')(salt, ahead('"cache_salt":"SALT"')(salt, body)),
    "many": behind(",".join(['"cache_salt":"SALT"'] * 50)),
    "escaped": behind('"cache\\u005fsalt":"SALT"'),
    "all escaped": behind('"' + "".join(f"\\u{ord(letter):04x}" for letter in "cache_salt") + '":"SALT"'),
    "other case": behind('"Cache_Salt":"SALT","CACHE_SALT":"SALT","cacheSalt":"SALT","cache-salt":"SALT"'),
    "blanks": behind(' "cache_salt" : "SALT" \n\t'),
    "nested": behind('"extra_body":{"cache_salt":"SALT"},"metadata":{"cache_salt":"SALT"}'),
    "extra key": behind('"extra_key":"SALT","vllm_xargs":{"cache_salt":"SALT"},"namespace":"SALT"'),
    "user": behind(f'"user":"{KEYS["a"]}","safety_identifier":"a"'),
}
REMOVED_SALTS: dict[str, Change] = {
    "null": behind('"cache_salt":null'),
    "empty": behind('"cache_salt":""'),
    "null, twice": behind('"cache_salt":null,"cache_salt":null'),
    "number": behind('"cache_salt":0'),
    "list": behind('"cache_salt":["SALT"]'),
    "object": behind('"cache_salt":{"a":"SALT"}'),
    "blanks at the end": lambda _, body: body + b" \r\n\t" * 20,
    "a second object": lambda _, body: body + b'{"cache_salt":null}',
    "a comment": lambda _, body: body[:-1] + b"}//{}",
    "a NUL": lambda _, body: body + b"\x00",
    "an open string": lambda _, body: body[:-1] + b',"x":"}',
    "an open object": lambda _, body: body[:-1] + b',"x":{"y":1}',
    "a mark": lambda _, body: b"\xef\xbb\xbf" + body,
    "utf-16": lambda _, body: body.decode().encode("utf-16-be"),
    "half an emoji": behind('"x":"\\ud83d","cache_salt":null'),
    "not a number": behind('"x":NaN,"cache_salt":null'),
}
