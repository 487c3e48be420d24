"""The words for what became of a request's affinity: a bounded vocabulary, since they are metric labels."""

from __future__ import annotations

from gateway.values import Affinity, BackendId, Binding, RequestFacts


def name_outcome(
    facts: RequestFacts,
    binding: Binding | None,
    home: int | None,
    cause: str,
    chosen: BackendId,
    is_retry: bool,
) -> tuple[Affinity, str]:
    """Return what became of the affinity and a reason from a bounded vocabulary."""
    if is_retry:
        return Affinity.FAILOVER, "failover"
    if binding is not None and cause:
        return Affinity.MOVED, cause
    if binding is not None and home is not None:
        stays = binding.backend_id == chosen
        return (Affinity.HIT, "home") if stays else (Affinity.SPILLED, "cheaper_elsewhere")
    if facts.session_key is not None:
        return Affinity.NEW, "new_placement"
    return Affinity.UNPINNED, "no_key" if facts.prompt_key is None else "prompt_group"
