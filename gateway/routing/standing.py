"""Who goes out: how each backend stands by the evidence, and how many a pool can do without.

A pool is the backends of one model that take new sessions and have been ready before. Evidence that may be
wrong, or that says "worse" and not "gone", is carried out only as far as the pool bears it:

* Failed probes, and a share of failures above the others', take a backend out only if at least
  `panic_threshold` of the pool is left (Envoy's panic threshold has the same default). Below it probes are
  not believed at all, and those that they took out serve again: the probes are more likely to be wrong than
  most of the fleet is to be dead, and what serves nobody is worse than what may serve badly.
* The last backends of a model stay, whatever they answer. Only refused connections take them out: nobody
  is there.

Pure. How evidence becomes a standing is `health.py`'s; which orders operators gave is the fleet's.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.values import BackendId


class Standing(enum.IntEnum):
    """What the evidence says of a backend. Worse ones are greater."""

    NEW = 0  # not seen well yet
    WELL = 1
    ON_TRIAL = 2  # requests took it out, its probes are good again: a few requests decide
    FAILED_PROBES = 3
    FAILS_OFTEN = 4  # a larger share of its requests than of the others'
    FAILED_REQUESTS = 5  # in a row
    REFUSED = 6  # nobody listens there


UNDOUBTED = frozenset((Standing.NEW, Standing.WELL, Standing.REFUSED))
"""Whose service does not depend on how the others stand."""
_TOLD_APART_BY_PROBES = (Standing.WELL, Standing.FAILED_PROBES, Standing.FAILS_OFTEN)

Models = frozenset[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One backend of the fleet, as its pools see it."""

    backend_id: BackendId
    models: Models  # None: not known, so it is taken to serve any
    standing: Standing
    is_open: bool = True  # it takes new sessions as far as operators are concerned


def spared(members: Iterable[Member], panic_threshold: float) -> frozenset[BackendId]:
    """Return the backends that stay in spite of their standing. O(members); next to nothing if all are well.

    Those with the same models and the same standing are alike, so they are judged once, together.
    """
    members = [member for member in members if member.standing is not Standing.NEW]
    doubtful = [one for one in members if one.standing not in UNDOUBTED]
    if not doubtful:
        return frozenset()
    pools = _Pools(members, doubtful)
    verdicts: dict[tuple[Models, Standing, bool], bool] = {}
    for one in doubtful:
        kind = (one.models, one.standing, one.is_open)
        if kind not in verdicts:
            verdicts[kind] = any(_stays(one.standing, pool, panic_threshold) for pool in pools.of(one))
    return frozenset(one.backend_id for one in doubtful if verdicts[one.models, one.standing, one.is_open])


class _Pools:
    """How many backends of each standing there are for each model in doubt."""

    def __init__(self, members: list[Member], doubtful: list[Member]) -> None:
        alike = Counter((one.models, one.standing) for one in members if one.is_open)
        in_doubt = frozenset().union(*(one.models or () for one in doubtful))
        self._all: Counter[Standing] = Counter()
        self._of_any: Counter[Standing] = Counter()  # those whose models are not known
        self._by_model: defaultdict[str, Counter[Standing]] = defaultdict(Counter)
        for (models, standing), number in alike.items():
            self._all[standing] += number
            if models is None:
                self._of_any[standing] += number
            for model in models & in_doubt if models else ():
                self._by_model[model][standing] += number

    def of(self, member: Member) -> Iterable[Counter[Standing]]:
        """One pool for each model that it serves."""
        itself = Counter() if member.is_open else Counter((member.standing,))
        if not member.models:
            return (self._all + itself,)
        return (self._by_model[model] + self._of_any + itself for model in member.models)


def _stays(standing: Standing, pool: Counter[Standing], panic_threshold: float) -> bool:
    num_well = pool[Standing.WELL]
    if standing is Standing.ON_TRIAL:
        return num_well == 0  # no trial then: it is the best there is
    if num_well + pool[Standing.ON_TRIAL] == 0:
        return True
    if standing is Standing.FAILED_PROBES:
        return num_well < panic_threshold * sum(pool[one] for one in _TOLD_APART_BY_PROBES)
    return standing is Standing.FAILS_OFTEN and num_well < panic_threshold * pool.total()
