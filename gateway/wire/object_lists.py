"""Lists of objects that several backends keep, read page by page and joined into one.

The joined list has the newest first, as the APIs do, and is cut into the client's pages here: a cursor is the
id of an object, and only the backend that made it could page by it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode

import msgspec

from gateway.errors import BadRequest, UpstreamProtocolError

PAGE_SIZE: Final = 100
"""What every API allows."""
_DEFAULT_LIMIT: Final = 20
_MAX_LIMIT: Final = 1_000
_PAGING: Final = ("after", "after_id", "before", "before_id", "limit", "order")


class Wanted(NamedTuple):
    """What a client asks for."""

    after: str | None
    before: str | None
    limit: int
    is_ascending: bool
    filters: tuple[tuple[str, str], ...]  # what is left of its query, for the backends

    def query(self, cursor_name: str, cursor: str | None) -> str:
        """Return the query for a backend's next page."""
        paging = [("limit", str(PAGE_SIZE)), ("order", "desc")]
        return urlencode([*self.filters, *paging, *([(cursor_name, cursor)] if cursor else [])])


def read_query(query: str) -> Wanted:
    """Raises BadRequest."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=64)
    except ValueError as error:
        raise BadRequest("the query has too many parameters") from error
    given = dict(pairs)
    limit = given.get("limit", str(_DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and int(limit) > 0):
        raise BadRequest("limit must be a positive number", param="limit")
    if given.get("order", "desc") not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc", param="order")
    return Wanted(
        after=given.get("after") or given.get("after_id") or None,
        before=given.get("before") or given.get("before_id") or None,
        limit=min(int(limit), _MAX_LIMIT),
        is_ascending=given.get("order") == "asc",
        filters=tuple(pair for pair in pairs if pair[0] not in _PAGING),
    )


def read_page(body: bytes) -> tuple[list[dict[str, Any]], bool]:
    """Return the objects of a backend's page, and whether there are more. Raises UpstreamProtocolError."""
    try:
        page = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UpstreamProtocolError("the backend's list is not JSON") from error
    data = page.get("data") if isinstance(page, dict) else None
    if not isinstance(data, list):
        raise UpstreamProtocolError("the backend's list has no `data`")
    objects = [one for one in data if isinstance(one, dict) and isinstance(one.get("id"), str)]
    return objects, bool(objects) and page.get("has_more") is True


def join(lists: Mapping[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Return all objects with their backends, newest first; an id that backends share counts once."""
    joined = {one["id"]: (name, one) for name in sorted(lists) for one in lists[name]}
    return sorted(joined.values(), key=lambda entry: (-_created_s(entry[1]), entry[1]["id"]))


def cut(
    objects: list[dict[str, Any]], wanted: Wanted, *, is_anthropic: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the client's page, and the answer around it. Raises BadRequest for an unknown cursor."""
    ordered = objects[::-1] if wanted.is_ascending else objects
    start, end = 0, len(ordered)
    if wanted.after is not None:
        start = _position(ordered, wanted.after) + 1
    if wanted.before is not None:
        end = _position(ordered, wanted.before)
        start = max(start, end - wanted.limit)
    page = ordered[start : min(end, start + wanted.limit)]
    has_more = start > 0 if wanted.before is not None else start + len(page) < end
    answer: dict[str, Any] = {} if is_anthropic else {"object": "list"}
    answer |= {"data": page, "has_more": has_more}
    answer |= {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return page, answer


def _position(ordered: list[dict[str, Any]], object_id: str) -> int:
    for index, one in enumerate(ordered):
        if one["id"] == object_id:
            return index
    raise BadRequest("nothing in this list has the id after or before which it is to go on", param="after")


def _created_s(described: dict[str, Any]) -> float:
    created = described.get("created_at")
    if isinstance(created, (int, float)):
        return float(created)
    try:
        return datetime.fromisoformat(str(created)).timestamp()
    except (ValueError, OverflowError):
        return 0.0
