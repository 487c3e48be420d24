"""A tenant as the request path sees it: its name and what it may do."""

from __future__ import annotations

import msgspec

from gateway.errors import BadRequest, ModelNotFound, NotFound, shown
from gateway.limits.settings import TenantLimits
from gateway.values import Binding, RequestFacts


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
        """Check that the tenant may ask this; of a stored object `check_object` decides on access.

        Raises ModelNotFound for a model that this tenant may not use, as if it did not exist, and BadRequest
        for a request that names itself at its engine: requests of other tenants may have the same name.
        """
        if self.is_known and facts.names_request:
            raise BadRequest(
                "`request_id` and `rid` are not accepted in a body here: send the header x-request-id",
                param="request_id",
            )
        if self.may_use(facts.model) or (facts.model is None and facts.is_about_object):
            return
        if facts.model is None:
            raise ModelNotFound("The request names no model, but this key requires one.", param="model")
        raise ModelNotFound(
            f"The model `{shown(facts.model)}` does not exist, or this key may not use it.", param="model"
        )

    def check_object(self, binding: Binding | None) -> None:
        """Raises NotFound for a stored answer, a file or the like that is not known to be this tenant's.

        Engines store them by id alone: only our own binding, under the tenant's key, says whose it is.
        """
        if self.is_known and binding is None:
            raise NotFound("Nothing has this id: it never existed, has expired, or was deleted.")


ANONYMOUS = Tenant()
