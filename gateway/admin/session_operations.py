"""Operations on sessions: find, list, show with history, move, end.

A session is named by its key (a hash) or found by the client's raw id, which is hashed here and never stored,
echoed or logged.
"""

from __future__ import annotations

import msgspec

from gateway.admin.describe import describe_binding, describe_ignored_id, describe_session
from gateway.admin.operations import IfMatch, Operation
from gateway.admin.orders import MoveOrder, SessionName, SessionQuery
from gateway.admin.parts import AdminParts
from gateway.admin.session_answers import SessionAnswer, SessionPage, SessionRow
from gateway.errors import BadRequest, Conflict, GatewayError, NotFound
from gateway.values import Api, BackendId, Binding, SessionKey
from gateway.wire.keys import to_bytes

MAX_MODELS_TRIED = 64
_KEY_DIGITS = 32


class SessionOperations:
    """What operators can see and change of bindings."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts

    def operations(self) -> list[Operation]:
        session_path = "/sessions/{key}"
        return [
            Operation(
                "GET",
                "/sessions",
                self.list_sessions,
                "Find a session by id or key, or list sessions page by page",
                tag="sessions",
            ),
            Operation(
                "GET",
                session_path,
                self.show_session,
                "Show one session: home, turns, tokens, hit rate, moves with their reasons",
                tag="sessions",
            ),
            Operation(
                "DELETE",
                session_path,
                self.end_session,
                "End a session: forget its home. Ending an unknown session succeeds",
                tag="sessions",
                statuses=(204,),
            ),
            Operation(
                "POST",
                f"{session_path}/move",
                self.move_session,
                "Move a session to another backend",
                tag="sessions",
                problems=(409,),
            ),
        ]

    async def list_sessions(self, *, query: SessionQuery) -> SessionPage:
        if query.session_id is not None:
            return await self._find(self._keys_of(query))
        if query.key is not None:
            return await self._find(self._keys_like(query.key, query.limit))
        if query.backend is not None:
            rows, cursor = await self._parts.sessions.list_by_backend(
                BackendId(query.backend), cursor=query.cursor, limit=query.limit
            )
            return SessionPage(
                sessions=[describe_binding(key, binding) for key, binding in rows], next_cursor=cursor
            )
        return await self._list_all(query)

    async def show_session(self, *, key: SessionName) -> SessionAnswer:
        return describe_session(self._parts, SessionKey(key), await self._binding(SessionKey(key)))

    async def end_session(self, *, key: SessionName, if_match: IfMatch) -> None:
        if if_match.header is not None:
            if_match.require(describe_binding(SessionKey(key), await self._binding(SessionKey(key))).etag())
        await self._parts.sessions.end(SessionKey(key))

    async def move_session(self, *, key: SessionName, body: MoveOrder, if_match: IfMatch) -> SessionAnswer:
        parts, session_key = self._parts, SessionKey(key)
        backend = parts.fleet.view.get(BackendId(body.backend))
        if backend is None:
            raise BadRequest("no such backend", param="backend")
        binding = await self._binding(session_key)
        if_match.require(describe_binding(session_key, binding).etag())
        if binding.backend_id == backend.backend_id:
            return describe_session(parts, session_key, binding)
        held = await parts.sessions.rebind(
            session_key, binding.version, backend.backend_id, backend.epoch, binding.context_tokens
        )
        if held is None or held.backend_id != backend.backend_id:
            raise Conflict(
                "session not moved: it changed meanwhile, or the store is not writable; check it and retry"
            )
        if parts.journal is not None:
            parts.journal.note_move(
                session_key, binding.backend_id, backend.backend_id, "operator", parts.clock()
            )
        return describe_session(parts, session_key, held)

    async def _binding(self, key: SessionKey) -> Binding:
        binding = await self._parts.sessions.get(key)
        if binding is None:
            raise NotFound("no bound session has this key")
        return binding

    # -- finding

    def _keys_of(self, query: SessionQuery) -> list[SessionKey]:
        """Return the keys of requests with this id, for the given model or for each served model."""
        assert query.session_id is not None
        if query.model is not None:
            models = [query.model]
        else:
            served = {
                model
                for backend in self._parts.fleet.view.backends.values()
                for model in backend.models or ()
            }
            models = sorted(served)[:MAX_MODELS_TRIED]
            if not models:
                raise BadRequest("no backend has reported its models yet: name the model", param="model")
        keys = [self._key_of(query.session_id, model, query.tenant) for model in models]
        return list(dict.fromkeys(keys))

    def _key_of(self, session_id: str, model: str, tenant: str) -> SessionKey:
        """Return the key of a request that has this id in its header."""
        headers = [(b"x-session-id", to_bytes(session_id))]
        body = msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": "?"}]})
        try:
            facts = self._parts.parser().parse(Api.CHAT, headers, body, tenant=tenant)
        except GatewayError as error:
            raise BadRequest(error.message, param="session_id") from error
        if facts.session_key is None:
            raise BadRequest("this id cannot name a session", param="session_id")
        return facts.session_key

    def _keys_like(self, prefix: str, limit: int) -> list[SessionKey]:
        if len(prefix) == _KEY_DIGITS:
            return [SessionKey(prefix)]
        if self._parts.journal is None:
            raise BadRequest("the journal is off (admin.journal_sessions: 0): give the full key", param="key")
        return [story.key for story in self._parts.journal.starting_with(prefix, limit)]

    async def _find(self, keys: list[SessionKey]) -> SessionPage:
        """Return the sessions of these keys, and of conversations that came under an ignored one."""
        found: list[SessionRow] = []
        ignored = [answer for key in keys if (answer := describe_ignored_id(self._parts, key)) is not None]
        instead = [SessionKey(key) for answer in ignored for key in reversed(answer.sessions)]
        for key in dict.fromkeys([*keys, *instead]):
            binding = await self._parts.sessions.get(key)
            if binding is not None:
                found.append(describe_binding(key, binding))
        return SessionPage(sessions=found, next_cursor=None, ignored_ids=ignored)

    async def _list_all(self, query: SessionQuery) -> SessionPage:
        """List backend by backend. The cursor is the current backend's name, then the store's own cursor."""
        name, _, inner = (query.cursor or "").partition("/")
        names = sorted(backend_id for backend_id in self._parts.fleet.view.backends if backend_id >= name)
        for place, backend_id in enumerate(names):
            cursor = inner if backend_id == name and inner else None
            rows, following = await self._parts.sessions.list_by_backend(
                backend_id, cursor=cursor, limit=query.limit
            )
            if following is not None:
                next_cursor: str | None = f"{backend_id}/{following}"
            else:
                next_cursor = f"{names[place + 1]}/" if place + 1 < len(names) else None
            if rows or next_cursor is None:
                return SessionPage(
                    sessions=[describe_binding(key, binding) for key, binding in rows],
                    next_cursor=next_cursor,
                )
        return SessionPage(sessions=[], next_cursor=None)
