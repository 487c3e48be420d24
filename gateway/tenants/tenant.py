"""A tenant as the request path sees it: its name and what it may do."""

from __future__ import annotations

import msgspec

from gateway.errors import ModelNotFound, NotFound, shown
from gateway.limits.settings import TenantLimits
from gateway.values import Binding, KeySource, RequestFacts


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant. Sessions, prompt groups and answers of different tenants are never shared."""

    name: str = "default"
    models: frozenset[str] | None = None  # None: all
    limits: TenantLimits = TenantLimits()
    has_limits: bool = False
    priority: int = 0
    cache_salt: str | None = None  # None: engines' caches are shared
    is_known: bool = False  # its clients have authenticated

    def may_use(self, model: str | None) -> bool:
        return self.models is None or model in self.models

    def check_request(self, facts: RequestFacts) -> None:
        """Raises ModelNotFound for a model that this tenant may not use, as if it did not exist."""
        if self.may_use(facts.model) or (facts.model is None and _names_stored_answer(facts)):
            return
        if facts.model is None:
            raise ModelNotFound("The request names no model, but this key requires one.", param="model")
        raise ModelNotFound(
            f"The model `{shown(facts.model)}` does not exist, or this key may not use it.", param="model"
        )

    def check_answer(self, binding: Binding | None) -> None:
        """Raises NotFound for a stored answer that is not known to be this tenant's.

        Engines store answers by id alone: only our own binding, under the tenant's key, says whose it is.
        """
        if binding is None:
            raise NotFound("No answer has this id.", param="previous_response_id")


def _names_stored_answer(facts: RequestFacts) -> bool:
    """Whether the request is for a stored answer, by its path: `check_answer` decides on access."""
    return facts.key_source is KeySource.RESPONSE_ID and not facts.sets_binding


ANONYMOUS = Tenant()
