"""The policy of a ledger: what each account may have. Values only; the rules are in `limits.py`.

Each limit of an account comes from the first of these that sets it: the account's own entry, its groups (the most
generous one), everyone's entry. If none does, there is no limit.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.record import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping


@frozen
class Limits:
    """The limits that one entry sets; None: it does not set this one."""

    #: On how many GPUs the account may hold leases at once. Several shares of one GPU count once.
    most_gpus: int | None = None
    #: How many of its requests may wait at once.
    most_waiting: int | None = None
    highest_priority: int | None = None
    #: A lease ends after this time, however often it is renewed.
    longest_seconds: float | None = None
    #: Whether its leases may be ended while they are idle and a request waits that could use the GPUs.
    idle_may_be_asked: bool | None = None


#: Of how many accounts the limits are remembered.
MOST_KNOWN: Final = 4096
NO_LIMITS: Final = Limits()


@frozen
class IdleRule:
    """When idle holders are asked to leave, if the limits of their account allow it."""

    #: How long a holder must have computed nothing.
    after_seconds: float = 1800.0
    #: How long a holder keeps its GPUs after the warning.
    grace_seconds: float = 300.0


@frozen
class Webhook:
    """An HTTP address to which events are sent."""

    url: str
    events: tuple[str, ...]
    #: The body, with `${name}` for values of the event; None: all of them as JSON.
    template: str | None = None
    #: A file with the secret that signs each message; None: they are not signed.
    secret_file: str | None = None


@frozen
class Policy:
    everyone: Limits = NO_LIMITS
    #: By account as `core/accounts.py` writes it.
    accounts: Mapping[str, Limits] = field(default_factory=dict)
    #: By the name of a group of users, or of the keys that `key_groups` lists.
    groups: Mapping[str, Limits] = field(default_factory=dict)
    #: For each account of a key, its groups.
    key_groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    idle: IdleRule = IdleRule()
    webhooks: tuple[Webhook, ...] = ()
    #: Whether metrics name accounts.
    names_in_metrics: bool = False
    #: Limits that were looked up before.
    _known: dict[tuple[str, tuple[str, ...]], Limits] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def has_limits(self) -> bool:
        """Whether it limits any account."""
        return any(limits != NO_LIMITS for limits in (self.everyone, *self.accounts.values(), *self.groups.values()))

    def limits_of(self, account: str, groups: tuple[str, ...] = ()) -> Limits:
        """`groups`: of the user, from the system's database; groups of keys are known here."""
        if (known := self._known.get((account, groups))) is not None:
            return known
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        found = self._known[account, groups] = self._find(account, groups)
        return found

    def _find(self, account: str, groups: tuple[str, ...]) -> Limits:
        of_groups = [
            limits
            for name in dict.fromkeys((*groups, *self.key_groups.get(account, ())))
            if (limits := self.groups.get(name)) is not None
        ]
        found: dict[str, Any] = {}
        for each in fields(Limits):
            said = (getattr(entry, each.name) for entry in (self.accounts.get(account, NO_LIMITS), *of_groups))
            own, *by_group = said
            values = [own] if own is not None else [value for value in by_group if value is not None]
            # Being asked to leave is less generous than not.
            most_generous = min if each.name == "idle_may_be_asked" else max
            found[each.name] = most_generous(values) if values else getattr(self.everyone, each.name)
        return Limits(**found)


NO_POLICY: Final = Policy()
