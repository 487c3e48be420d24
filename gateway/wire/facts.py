"""Turns one request into `RequestFacts`, everything that routing knows about it.

Combines the body (`bodies`), the prompt (`prompts`) and the key (`cascade`). Invariant: pure and total: any
bytes give facts or an error with a 4xx status. A body whose content encoding cannot be decoded here is still
forwarded; its facts come from the headers alone. Knows nothing about backends.
"""

from __future__ import annotations

from typing import Final, TypedDict

from gateway.errors import UnsupportedMediaType
from gateway.values import Api, KeySource, RequestFacts, SessionKey
from gateway.wire.bodies import Body, BodyDecoder
from gateway.wire.cascade import KeyCascade, Names
from gateway.wire.encodings import decode_body
from gateway.wire.forms import RawHeaders, model_of_form
from gateway.wire.keys import IdentityFinder, KeyHasher, Scope, to_bytes
from gateway.wire.prompts import Prompt, PromptReader
from gateway.wire.routes import response_id_of
from gateway.wire.settings import KeySettings

# These sets hold values and are looked up with `_value_`: the hash and `value` of an Enum member are Python
# code in 3.11 and cost more than the look-up. Requests that leave nothing in the cache for a later turn. They
# may follow a binding but never make one.
_CACHELESS: Final = frozenset(
    {Api.EMBEDDINGS.value, Api.RERANK.value, Api.TOKENIZE.value, Api.MODELS.value, Api.AUDIO.value}
)
_CACHELESS_PATHS: Final = frozenset({"/v1/messages/count_tokens", "/v1/responses/input_tokens"})
_BODYLESS: Final = frozenset({Api.MODELS.value, Api.OTHER.value})
_PROMPTLESS: Final = frozenset({Api.EMBEDDINGS.value, Api.RERANK.value, Api.TOKENIZE.value, Api.AUDIO.value})


class ParseOptions(TypedDict):
    """The named arguments of `FactsParser.parse`, for callers that pass them on."""

    tenant: str
    path: str
    query: str
    content_encoding: str | None


class FactsParser:
    """Parses requests with one set of options and one secret. Its only state is a memo of system prompts."""

    def __init__(self, settings: KeySettings, secret: bytes, *, max_decoded_bytes: int = 64 << 20) -> None:
        self._hasher = KeyHasher(secret)
        self._finder = IdentityFinder(settings)
        self._cascade = KeyCascade(settings, self._hasher, self._finder)
        self._prompts = PromptReader(settings, self._hasher)
        self._decoder = BodyDecoder(self._cascade.body_names, max_items=settings.max_items)
        self._max_decoded_bytes = max_decoded_bytes

    def response_session_key(self, tenant: str, response_id: str) -> SessionKey:
        """Return the key that follow-ups of this response will have. Bind it when the id is seen."""
        return self._hasher.response_key(tenant, to_bytes(response_id))

    def parse(
        self,
        api: Api,
        raw_headers: RawHeaders,
        body: bytes,
        *,
        tenant: str = "default",
        path: str = "",
        query: str = "",
        content_encoding: str | None = None,
    ) -> RequestFacts:
        """Return the facts of one request; `path` is the matched route's path.

        Raises BadRequest if no engine could serve the body, BodyTooLarge if a compressed body decodes to more
        than the limit.
        """
        response_id = response_id_of(path) if api is Api.RESPONSES else None
        if response_id is not None:
            return self._stored_response(tenant, response_id)
        if api is Api.REALTIME:
            parsed = self._decoder.from_query(query)
        else:
            parsed = self._read_body(api, raw_headers, body, content_encoding)
        scope = self._hasher.scope(tenant, parsed.model)
        names = Names(self._finder.scan(raw_headers), parsed, tenant, scope)
        is_cacheless = api._value_ in _CACHELESS or path in _CACHELESS_PATHS
        return self._facts(api, names, is_cacheless=is_cacheless)

    def _stored_response(self, tenant: str, response_id: str) -> RequestFacts:
        """Return facts for a stored response: only the backend that made it has it, whatever the session."""
        key = self._hasher.response_key(tenant, to_bytes(response_id))
        return RequestFacts(
            api=Api.RESPONSES,
            tenant=tenant,
            session_key=key,
            answer_key=key,
            key_source=KeySource.RESPONSE_ID,
            is_follow_up=True,
            sets_binding=False,
        )

    def _facts(self, api: Api, names: Names, *, is_cacheless: bool) -> RequestFacts:
        body = names.body
        key = self._cascade.find(names)
        wants_fingerprint = key is None and self._cascade.uses_fingerprint
        prompt = self._read_prompt(api, body, names.scope, wants_fingerprint=wants_fingerprint)
        prompt_key = prompt.system.prompt_key if prompt.system else None
        if wants_fingerprint and prompt.first_user:
            key = self._cascade.fingerprint(names, prompt_key or "", prompt.first_user)
        keyless = KeySource.PROMPT_GROUP if prompt_key else KeySource.NONE
        return RequestFacts(
            api=api,
            tenant=names.tenant,
            model=body.model,
            is_stream=body.is_stream,
            session_key=key.session_key if key else None,
            prompt_key=prompt_key,
            answer_key=self._cascade.answer_key(names) if api is Api.RESPONSES else None,
            key_source=key.source if key else keyless,
            prefix=prompt.prefix,
            num_prompt_bytes=prompt.num_bytes,
            max_output_tokens=body.max_output_tokens,
            is_follow_up=prompt.is_follow_up or (key is not None and key.source is KeySource.RESPONSE_ID),
            sets_binding=not (is_cacheless or names.headers.is_auxiliary or prompt.is_auxiliary),
            obeys_load_bound=key.is_bucket if key else prompt_key is not None,
        )

    def _read_body(self, api: Api, raw_headers: RawHeaders, body: bytes, encoding: str | None) -> Body:
        if api._value_ in _BODYLESS:
            return Body()
        if encoding is not None and encoding.strip().lower() not in ("", "identity"):
            try:
                body = decode_body(body, encoding, max_bytes=self._max_decoded_bytes)
            except UnsupportedMediaType:
                return Body()
        if api is Api.AUDIO and body[:1] != b"{":
            return Body(model=model_of_form(raw_headers, body))
        return self._decoder.decode(api, body)

    def _read_prompt(self, api: Api, body: Body, scope: Scope, *, wants_fingerprint: bool) -> Prompt:
        if api._value_ in _PROMPTLESS:
            return Prompt(num_bytes=len(body.text))
        return self._prompts.read(api, body, scope, wants_fingerprint=wants_fingerprint)


def is_read_whole(api: Api, body: bytes, content_encoding: str | None) -> bool:
    """Whether parse time grows with the body: not if headers or the structure of a form suffice."""
    if api._value_ in _BODYLESS:
        return False
    return api is not Api.AUDIO or body[:1] == b"{" or content_encoding is not None
