"""Builds the OpenAPI 3.1 document of the admin API from the annotations that also decode and encode.

Only titles are written by hand, so the document lists exactly the operations that exist and describes what
they really accept and return.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gateway.admin.access import Problem
from gateway.admin.operations import Operation

_REFERENCE = "#/components/schemas/{name}"
_TITLES = {
    400: "Invalid request",
    401: "Missing or unknown token",
    403: "Not allowed with this token or from this client",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflicts with the current state",
    412: "Changed since it was read",
    413: "Body too large",
    415: "Body is not JSON",
    502: "A backend failed",
    503: "A backend or the fleet cannot serve now",
    504: "A backend did not answer in time",
}
_SUCCESSES = {
    200: "Success",
    201: "Added",
    202: "Accepted: it holds at this gateway, and at the others as soon as Redis can be told (`is_shared`)",
    204: "Success, no content",
}


def openapi_document(operations: Sequence[Operation], prefix: str) -> dict[str, Any]:
    """Describe all operations under `prefix`."""
    types = _types_of(operations)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = paths.setdefault(prefix + operation.path, {})
        path[operation.method.lower()] = _describe(operation, schema_of, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Homing admin API",
            "version": importlib.metadata.version("homing"),
            "description": "The state of the fleet, where sessions live, and why requests go where they go. "
            "Changes are idempotent, and conditional if `If-Match` is sent.",
        },
        "paths": paths,
        "components": {
            "schemas": {
                name: schema
                for name, schema in components.items()
                if name
                not in {
                    operation.shape.query.__name__
                    for operation in operations
                    if operation.shape.query is not None
                }
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _types_of(operations: Iterable[Operation]) -> list[Any]:
    found: dict[Any, None] = {Problem: None}
    for operation in operations:
        shape = operation.shape
        for kind in (shape.query, shape.body, shape.answer):
            if kind is not None:
                found[kind] = None
    return list(found)


def _describe(
    operation: Operation, schema_of: dict[Any, dict[str, Any]], components: dict[str, Any]
) -> dict[str, Any]:
    shape = operation.shape
    document: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": _parameters(operation, components),
        "responses": _responses(operation, schema_of),
    }
    if shape.body is not None:
        document["requestBody"] = {
            "required": not shape.is_body_optional,
            "content": {"application/json": {"schema": schema_of[shape.body]}},
        }
    return document


def _parameters(operation: Operation, components: dict[str, Any]) -> list[dict[str, Any]]:
    shape = operation.shape
    parameters: list[dict[str, Any]] = []
    for name, kind in shape.path_types.items():
        schema = msgspec.json.schema(kind)
        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})
    if shape.query is not None:
        declared = components[shape.query.__name__]
        for name, schema in declared["properties"].items():
            parameters.append({"name": name, "in": "query", "schema": _without_null(schema)})
    if shape.uses_if_match:
        text = "Change only if the current entity tag is one of these; if absent, change unconditionally"
        parameters.append(
            {"name": "If-Match", "in": "header", "description": text, "schema": {"type": "string"}}
        )
    return parameters


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A query parameter is absent, never null."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    return {key: value for key, value in (schema | kinds[0]).items() if key not in ("anyOf", "default")}


def _responses(operation: Operation, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    shape = operation.shape
    responses: dict[str, Any] = {}
    for status in operation.statuses:
        response: dict[str, Any] = {"description": _SUCCESSES[status]}
        if shape.answer is not None and status != 204:
            response["content"] = {"application/json": {"schema": schema_of[shape.answer]}}
            if hasattr(shape.answer, "etag"):
                response["headers"] = {"ETag": {"schema": {"type": "string"}}}
        responses[str(status)] = response
    for status in sorted(_problems_of(operation)):
        responses[str(status)] = {
            "description": _TITLES[status],
            "content": {"application/problem+json": {"schema": schema_of[Problem]}},
        }
    return responses


def _problems_of(operation: Operation) -> set[int]:
    shape = operation.shape
    found = {
        401,
        403,
        415,
        *operation.problems,
    }  # 415: a non-JSON body is refused even where none is expected
    if shape.path_types:
        found.add(404)
    if shape.query is not None or shape.body is not None:
        found.add(400)
    if shape.body is not None:
        found.add(413)
    if shape.uses_if_match:
        found.add(412)
    return found
