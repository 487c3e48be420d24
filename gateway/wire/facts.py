"""Turns one request into `RequestFacts`, everything that routing knows about it.

Ties the parts together: which body is read (`bodies`), what its prompt is (`prompts`), which key it has
(`cascade`), and what the turn before has told already (`conversations`). Invariant: pure, and total: any
bytes give facts or an error with a 4xx status. Whether a request may be served depends on its facts, so a
body in a content encoding that cannot be opened is refused. Only passed-through paths may carry anything: a
body from which no single model can be read names none there. Knows nothing of backends.
"""

from __future__ import annotations

from typing import Final, TypedDict

from gateway.errors import BadRequest, GatewayError
from gateway.values import Api, KeySource, RequestFacts, SessionKey
from gateway.wire.bodies import Body, BodyDecoder
from gateway.wire.cascade import KeyCascade
from gateway.wire.conversations import MIN_BYTES, Conversations, Found, Reading, Request, is_same_scope
from gateway.wire.encodings import decode_body
from gateway.wire.forms import RawHeaders, is_multipart, model_of_form
from gateway.wire.keys import IdentityFinder, KeyHasher, Marks, to_bytes
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
_CONVERSATIONS: Final = frozenset({Api.CHAT.value, Api.MESSAGES.value, Api.RESPONSES.value})
_BODYLESS: Final = frozenset({Api.MODELS.value, Api.REALTIME.value})
_PROMPTLESS: Final = frozenset(
    {Api.EMBEDDINGS.value, Api.RERANK.value, Api.TOKENIZE.value, Api.AUDIO.value, Api.OTHER.value}
)


class ParseOptions(TypedDict):
    """The named arguments of `FactsParser.parse`, for callers that pass them on."""

    tenant: str
    path: str
    query: str
    content_encoding: str | None


class FactsParser:
    """Parses requests under one set of options and one secret. Its memory changes no result."""

    def __init__(
        self,
        settings: KeySettings,
        secret: bytes,
        *,
        max_decoded_bytes: int = 64 << 20,
        min_remembered_bytes: int = MIN_BYTES,
    ) -> None:
        self._hasher = KeyHasher(secret)
        self._finder = IdentityFinder(settings)
        self._cascade = KeyCascade(settings, self._hasher, self._finder)
        self._prompts = PromptReader(settings, self._hasher)
        self._decoder = BodyDecoder(self._cascade.body_names, max_items=settings.max_items)
        self._conversations = Conversations(
            self._decoder,
            self._hasher.secret_json(),
            max_bytes=settings.conversation_memo_bytes,
            min_bytes=min_remembered_bytes,
        )
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

        Raises BadRequest if no engine could serve the body or two could read it differently, BodyTooLarge if
        a compressed body decodes to more than the limit, UnsupportedMediaType.
        """
        response_id = response_id_of(path) if api is Api.RESPONSES else None
        if response_id is not None:
            return self._stored_response(tenant, response_id)
        marks = self._finder.marks(raw_headers)
        if api is Api.OTHER:
            reading = self._read(
                api, marks, tenant, self._passed_through(raw_headers, body, content_encoding)
            )
            return _facts(api, tenant, reading, is_cacheless=False)
        content = self._content(api, raw_headers, body, content_encoding)
        if content is not None and api._value_ in _CONVERSATIONS and self._conversations.watches(content):
            request = Request(api, marks, content, self._hasher.scope(tenant, None).seed)
            reading = self._read_conversation(request, tenant)
        else:
            reading = self._read(api, marks, tenant, self._decode(api, raw_headers, content, query))
        is_cacheless = api._value_ in _CACHELESS or path in _CACHELESS_PATHS
        return _facts(api, tenant, reading, is_cacheless=is_cacheless)

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

    def _passed_through(self, raw_headers: RawHeaders, body: bytes, encoding: str | None) -> Body:
        """Return the model of a body that may be anything."""
        try:
            content = self._content(Api.OTHER, raw_headers, body, encoding)
            return Body(model=self._decode(Api.OTHER, raw_headers, content, "").model)
        except GatewayError:
            return Body()

    def _content(self, api: Api, raw_headers: RawHeaders, body: bytes, encoding: str | None) -> bytes | None:
        """Return the body as JSON or form; None where it tells nothing."""
        if api._value_ in _BODYLESS:
            return None
        if encoding is None or encoding.strip().lower() in ("", "identity"):
            return body
        content = decode_body(body, encoding, max_bytes=self._max_decoded_bytes)
        self._check_reads_one_way(api, raw_headers, body)
        return content

    def _check_reads_one_way(self, api: Api, raw_headers: RawHeaders, body: bytes) -> None:
        """Raise BadRequest if a compressed body also makes sense as it is: engines may not decode it."""
        try:
            body = body.lstrip()
            if body[:1] not in (b"{", b"-") or self._decode(api, raw_headers, body, "").model is None:
                return
        except BadRequest:
            return
        raise BadRequest("the body is JSON or a form, though it has a content encoding")

    def _decode(self, api: Api, raw_headers: RawHeaders, content: bytes | None, query: str) -> Body:
        if api is Api.REALTIME:
            return self._decoder.from_query(query)
        if content is None:
            return Body()
        if api is Api.AUDIO or api is Api.OTHER:
            model = model_of_form(raw_headers, content)
            if content[:1] != b"{" or is_multipart(raw_headers):
                return Body(model=model)
            if model is not None:
                raise BadRequest("the body is JSON and a form", param="model")
        return self._decoder.decode(api, content)

    def _read_conversation(self, request: Request, tenant: str) -> Reading:
        """Read a list of messages, going on from what is known of it. Changes the memory."""
        found = self._conversations.find(request)
        reading = None if found is None else self._go_on(request, tenant, found)
        if reading is None:
            body = self._decoder.decode(request.api, request.content)
            wants_progress = request.opening > 0
            reading = self._read(request.api, request.marks, tenant, body, wants_progress=wants_progress)
        self._conversations.keep(request, reading)
        return reading

    def _go_on(self, request: Request, tenant: str, found: Found) -> Reading | None:
        """Read what follows the known part; None where the rest of the body asks for reading all of it."""
        known, body = found.known, found.body
        scope = self._hasher.scope(tenant, body.model)
        if not is_same_scope(known, scope, body):
            return None
        identity = known.identity
        if body.names != known.names:
            identity = self._cascade.identify(request.api, request.marks, body, tenant, scope)
        if identity.key is None and self._cascade.uses_fingerprint and not known.has_fingerprint:
            return None
        wants_progress = self._conversations.is_far_behind(request, found)
        prompt = self._prompts.read_on(known.progress, body, wants_progress=wants_progress)
        return Reading(body, scope, identity, prompt, known.fingerprint, known.has_fingerprint, found)

    def _read(
        self, api: Api, marks: Marks, tenant: str, body: Body, *, wants_progress: bool = False
    ) -> Reading:
        scope = self._hasher.scope(tenant, body.model)
        identity = self._cascade.identify(api, marks, body, tenant, scope)
        wants_fingerprint = identity.key is None and self._cascade.uses_fingerprint
        if api._value_ in _PROMPTLESS:
            prompt = Prompt(num_bytes=len(body.text))
        else:
            prompt = self._prompts.read(
                api, body, scope, wants_fingerprint=wants_fingerprint, wants_progress=wants_progress
            )
        reading = Reading(body, scope, identity, prompt, has_fingerprint=wants_fingerprint)
        if wants_fingerprint and prompt.first_user:
            prompt_key = prompt.system.prompt_key if prompt.system else ""
            reading.fingerprint = self._cascade.fingerprint(scope, prompt_key, prompt.first_user)
        return reading


def _facts(api: Api, tenant: str, reading: Reading, *, is_cacheless: bool) -> RequestFacts:
    body, prompt, identity = reading.body, reading.prompt, reading.identity
    key = identity.key or reading.fingerprint
    prompt_key = prompt.system.prompt_key if prompt.system else None
    keyless = KeySource.PROMPT_GROUP if prompt_key else KeySource.NONE
    return RequestFacts(
        api=api,
        tenant=tenant,
        model=body.model,
        is_stream=body.is_stream,
        session_key=key.session_key if key else None,
        prompt_key=prompt_key,
        answer_key=identity.answer_key,
        key_source=key.source if key else keyless,
        prefix=prompt.prefix,
        num_prompt_bytes=prompt.num_bytes,
        max_output_tokens=body.max_output_tokens,
        is_follow_up=prompt.is_follow_up or (key is not None and key.source is KeySource.RESPONSE_ID),
        sets_binding=not (is_cacheless or identity.is_auxiliary or prompt.is_auxiliary),
        obeys_load_bound=key.is_bucket if key else prompt_key is not None,
    )


def is_read_whole(api: Api, body: bytes, content_encoding: str | None) -> bool:
    """Whether parse time grows with the body: not if headers or the structure of a form suffice."""
    if api._value_ in _BODYLESS:
        return False
    is_form = api is Api.AUDIO or api is Api.OTHER
    return not is_form or body[:1] == b"{" or content_encoding is not None
