"""Translates the engine's refusals into HTTP errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine_adapter.engine.core.async_engine import EngineDead
from engine_adapter.engine.core.llm_engine import RequestRefused
from engine_adapter.engine.scheduling.scheduler import QueueFull
from engine_adapter.server.errors import ApiError, bad_request, overloaded


@contextmanager
def engine_errors_as_answers(prompt_param: str) -> Iterator[None]:
    """Raise an `ApiError` instead of the engine's exceptions."""
    try:
        yield
    except RequestRefused as error:
        raise bad_request(str(error), param=prompt_param) from error
    except QueueFull as error:
        raise overloaded("too many requests are waiting", retry_after_s=2) from error
    except EngineDead as error:
        raise ApiError(503, str(error), code="engine_dead", error_type="api_error") from error
