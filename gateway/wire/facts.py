"""Turns one request into `RequestFacts`, everything that routing knows about it.

Ties the parts together: which body is read (`bodies`), what its prompt is (`prompts`), which key it has
(`cascade`), and what the turn before has told already (`conversations`). Invariant: pure, and total: any
bytes give facts or an error with a 4xx status. Whether a request may be served depends on its facts, so a
body in a content encoding that cannot be opened is refused. Only passed-through paths may carry anything: a
body from which no single model can be read names none there. Knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypedDict

from gateway.errors import BadRequest, GatewayError
from gateway.values import Api, KeySource, RequestFacts, SessionKey
from gateway.wire.bodies import Body, BodyDecoder, asks_for_no_usage
from gateway.wire.cascade import Identity, KeyCascade
from gateway.wire.conversations import MIN_BYTES, Conversations, Found, Reading, Request, is_same_scope
from gateway.wire.encodings import decode_body
from gateway.wire.forms import RawHeaders, is_multipart, model_of_form
from gateway.wire.keys import IdentityFinder, KeyHasher, Marks, to_bytes
from gateway.wire.objects import (
    FILE,
    RESPONSE,
    Place,
    may_name_files,
    named_files,
    named_objects,
    place_of,
)
from gateway.wire.prompts import Prompt, PromptReader
from gateway.wire.routes import COUNT_PATHS
from gateway.wire.settings import KeySettings

# These sets hold values and are looked up with `_value_`: the hash and `value` of an Enum member are Python
# code in 3.11 and cost more than the look-up. Requests that leave nothing in the cache for a later turn. They
# may follow a binding but never make one.
_CACHELESS: Final = frozenset({Api.EMBEDDINGS.value, Api.RERANK.value, Api.MODELS.value, Api.AUDIO.value})
_WITH_OBJECTS: Final = frozenset({Api.OBJECTS.value, Api.MESSAGE_BATCHES.value, Api.RESPONSES.value})
_CONVERSATIONS: Final = frozenset({Api.CHAT.value, Api.MESSAGES.value, Api.RESPONSES.value})
_BODYLESS: Final = frozenset({Api.MODELS.value, Api.REALTIME.value})
_TELLS_IF_ASKED: Final = frozenset({Api.CHAT.value, Api.COMPLETIONS.value})
_PROMPTLESS: Final = frozenset(
    {Api.EMBEDDINGS.value, Api.RERANK.value, Api.TOKENIZE.value, Api.AUDIO.value, Api.OTHER.value}
)

_PROBE_BYTES: Final = 128  # of a message of one word, in any form


IsSuspect = Callable[[str, str, SessionKey], bool]
"""Whether a tenant's key, from a header or field of this name, may be ignored as naming no session."""


def _never(*_: object) -> bool:
    return False


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
        is_suspect: IsSuspect = _never,
    ) -> None:
        """`is_suspect` says of which keys the conversation's fingerprint is wanted too."""
        self._is_suspect = is_suspect
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

    def object_key(self, tenant: str, kind: str, object_id: str) -> SessionKey:
        """Return the key of an object of this kind. Bind it when the id is seen."""
        return self._hasher.object_key(tenant, kind, to_bytes(object_id))

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
        place = place_of(path) if api._value_ in _WITH_OBJECTS else None
        if place is not None and place.kind is RESPONSE:
            assert place.object_id is not None
            return self._stored_response(tenant, place.object_id)
        if place is not None:
            return self._about_object(place, tenant, raw_headers, body, content_encoding)
        marks = self._finder.marks(raw_headers)
        if api is Api.OTHER:
            body_read = self._passed_through(raw_headers, body, content_encoding)
            return _facts(api, tenant, self._read(api, marks, tenant, body_read), is_cacheless=False)
        content = self._content(api, raw_headers, body, content_encoding)
        if content is None or api._value_ not in _CONVERSATIONS:
            reading = self._read(api, marks, tenant, self._decode(api, raw_headers, content, query))
        elif self._conversations.watches(content):
            request = Request(api, marks, content, self._hasher.scope(tenant, None).seed)
            reading = self._read_conversation(request, tenant)
        else:
            reading = self._read(api, marks, tenant, self._decoder.decode(api, content))
            if may_name_files(content):
                reading.file_keys = self._file_keys(tenant, content)
        is_cacheless = api._value_ in _CACHELESS or path in COUNT_PATHS
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
            is_about_object=True,
            sets_binding=False,
        )

    def _about_object(
        self,
        place: Place,
        tenant: str,
        raw_headers: RawHeaders,
        body: bytes,
        content_encoding: str | None,
    ) -> RequestFacts:
        """Return facts for a request about objects that engines keep: who made them must have it."""
        named = [] if place.object_id is None else [(place.kind.name, place.object_id)]
        if body and not place.takes_form:
            named += named_objects(place, self._opened(place.kind.api, raw_headers, body, content_encoding))
        return RequestFacts(
            api=place.kind.api,
            tenant=tenant,
            object_keys=tuple(self.object_key(tenant, kind, object_id) for kind, object_id in named),
            is_about_object=not place.computes,
            sets_binding=False,
        )

    def _passed_through(self, raw_headers: RawHeaders, body: bytes, encoding: str | None) -> Body:
        """Return what decides on access in a body that may be anything. Forms name no request at engines."""
        try:
            content = self._content(Api.OTHER, raw_headers, body, encoding)
            read = self._decode(Api.OTHER, raw_headers, content, "")
        except GatewayError:
            return Body(names_request=not is_multipart(raw_headers))  # it may: nobody knows
        return Body(model=read.model, names_request=self._cascade.names_request(read))

    def _content(self, api: Api, raw_headers: RawHeaders, body: bytes, encoding: str | None) -> bytes | None:
        """Return the body as JSON or form; None where it tells nothing."""
        if api._value_ in _BODYLESS:
            return None
        return self._opened(api, raw_headers, body, encoding)

    def _opened(self, api: Api, raw_headers: RawHeaders, body: bytes, encoding: str | None) -> bytes:
        """Return the body without its content encoding."""
        if encoding is None or encoding.strip().lower() in ("", "identity"):
            return body
        content = decode_body(body, encoding, max_bytes=self._max_decoded_bytes)
        self._check_reads_one_way(api, raw_headers, body)
        return content

    def _check_reads_one_way(self, api: Api, raw_headers: RawHeaders, body: bytes) -> None:
        """Raise BadRequest if a compressed body also makes sense as it is: engines may not decode it."""
        body = body.lstrip()
        if body[:1] not in (b"{", b"-"):
            return
        try:
            read = self._decode(api, raw_headers, body, "")
        except BadRequest:
            return
        if body[:1] == b"{" or read.model is not None:
            raise BadRequest("the body is JSON or a form, though it has a content encoding")

    def _decode(self, api: Api, raw_headers: RawHeaders, content: bytes | None, query: str) -> Body:
        if api is Api.REALTIME:
            return self._decoder.from_query(query)
        if content is None:
            return Body()
        if api is Api.AUDIO or api is Api.OTHER:
            model = model_of_form(raw_headers, content)
            if content.lstrip()[:1] != b"{" or is_multipart(raw_headers):
                return Body(model=model)
            if model is not None:
                raise BadRequest("the body is JSON and a form", param="model")
        return self._decoder.decode(api, content)

    def _read_conversation(self, request: Request, tenant: str) -> Reading:
        """Read a list of messages, going on from what is known of it. Changes the memory.

        What is remembered names no files: of the body they are searched for where it is new.
        """
        found = self._conversations.find(request)
        reading = None if found is None else self._go_on(request, tenant, found)
        if reading is None:
            body = self._decoder.decode(request.api, request.content)
            wants_progress = request.opening > 0
            reading = self._read(request.api, request.marks, tenant, body, wants_progress=wants_progress)
        start = 0 if found is None else found.known.end
        if may_name_files(request.content, start):
            reading.file_keys = self._file_keys(tenant, request.content)
        if not reading.file_keys:
            self._conversations.keep(request, reading)
        return reading

    def _file_keys(self, tenant: str, content: bytes) -> tuple[SessionKey, ...]:
        return tuple(self.object_key(tenant, FILE.name, file_id) for file_id in named_files(content))

    def _go_on(self, request: Request, tenant: str, found: Found) -> Reading | None:
        """Read what follows the known part; None where the rest of the body asks for reading all of it."""
        known, body = found.known, found.body
        scope = self._hasher.scope(tenant, body.model)
        if not is_same_scope(known, scope, body):
            return None
        identity = known.identity
        if body.names != known.names:
            identity = self._cascade.identify(request.api, request.marks, body, tenant, scope)
        if known.fingerprint is None and self._wants_fingerprint(tenant, identity):
            return None
        wants_progress = self._conversations.is_far_behind(request, found)
        prompt = self._prompts.read_on(known.progress, body, wants_progress=wants_progress)
        return Reading(body, scope, identity, prompt, known.fingerprint, found)

    def _read(
        self, api: Api, marks: Marks, tenant: str, body: Body, *, wants_progress: bool = False
    ) -> Reading:
        scope = self._hasher.scope(tenant, body.model)
        identity = self._cascade.identify(api, marks, body, tenant, scope)
        wants_fingerprint = self._wants_fingerprint(tenant, identity)
        if api._value_ in _PROMPTLESS:
            prompt = Prompt(num_bytes=len(body.text))
        else:
            prompt = self._prompts.read(
                api, body, scope, wants_fingerprint=wants_fingerprint, wants_progress=wants_progress
            )
        reading = Reading(body, scope, identity, prompt)
        if prompt.opening:
            system = prompt.system.stable if prompt.system else b""
            reading.fingerprint = self._cascade.fingerprint(scope, system, prompt.opening)
        return reading

    def _wants_fingerprint(self, tenant: str, identity: Identity) -> bool:
        if not self._cascade.uses_fingerprint:
            return False
        key = identity.key
        return key is None or self._is_suspect(tenant, key.name, key.session_key)


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
        lacks_usage=body.is_stream
        and api._value_ in _TELLS_IF_ASKED
        and asks_for_no_usage(body.stream_options),
        session_key=key.session_key if key else None,
        prompt_key=prompt_key,
        answer_key=identity.answer_key,
        object_keys=identity.object_keys + reading.file_keys,
        key_source=key.source if key else keyless,
        key_name=key.name if key else "",
        fingerprint=reading.fingerprint.session_key if reading.fingerprint else None,
        prefix=prompt.prefix,
        num_prompt_bytes=prompt.num_bytes,
        max_output_tokens=body.max_output_tokens,
        is_follow_up=prompt.is_follow_up or (key is not None and key.source is KeySource.RESPONSE_ID),
        names_request=identity.names_request or body.names_request,
        sets_binding=not (
            is_cacheless
            or identity.is_auxiliary
            or prompt.is_auxiliary
            or (body.max_output_tokens == 1 and _is_probe(prompt))
        ),
        obeys_load_bound=key.is_bucket if key else prompt_key is not None,
    )


def _is_probe(prompt: Prompt) -> bool:
    """Whether a request for one token sends a word: the client asks what its quota or a tool costs, and goes
    on with nothing. Claude Code does, under the id of its session, where an engine cannot count tokens."""
    if prompt.is_follow_up or not prompt.prefix:
        return False
    return len(prompt.prefix) <= 2 and prompt.prefix[-1].num_bytes <= _PROBE_BYTES


def is_read_whole(api: Api, body: bytes, content_encoding: str | None) -> bool:
    """Whether parse time grows with the body: not if headers or the structure of a form suffice."""
    if api._value_ in _BODYLESS:
        return False
    is_form = api is Api.AUDIO or api is Api.OTHER or api is Api.OBJECTS
    return not is_form or body[:1] == b"{" or content_encoding is not None
