"""The device time that each tenant has had: one counter per tenant, divided by its weight."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from tuneserve_engine.core.jobs import Job, JobKind


class FairShare:
    """The counters of tenants: device seconds used, divided by ``weights``, 1 if not named.

    A tenant gains nothing from a time without work: it comes back at the lowest counter of the
    tenants that had work.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._first_weights = dict(weights)
        self._weights = self._first_weights
        self._counters: dict[str, float] = {}
        self._floor = 0.0  # the lowest counter of a tenant with work; never falls
        self._batches = 0
        self._last_batch: dict[str, int] = {}
        self.sampling_lead_s: dict[str, float] = {}
        """How much more device time a tenant's samples had than its other work."""
        self.largest_s = 0.0
        """The largest device time of one request so far."""

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Override the weights given at construction with these."""
        self._weights = {**self._first_weights, **weights}

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def counter(self, tenant: str) -> float:
        """Return the tenant's counter, or the floor at which an absent tenant would come back."""
        return self._counters.get(tenant, self._floor)

    def turn_key(
        self, tenant: str, job: Job, charged: Mapping[str, float] | None = None
    ) -> tuple[float, int, int]:
        """Return the sort key of the tenant's turn; the least goes first.

        The order is: lowest counter, then served longest ago, then released first. Tenants in
        ``charged`` are being served right now.
        """
        if charged and tenant in charged:
            return charged[tenant], self._batches + 1, job.release
        at = self._counters.get(tenant, self._floor)
        return at, self._last_batch.get(tenant, 0), job.release

    def lift_arrivals(self, waiting: Collection[str]) -> None:
        """Lift tenants that come back to the floor, and forget absent tenants not above it."""
        busy = [self._counters[tenant] for tenant in waiting if tenant in self._counters]
        if not waiting:  # no tenant missed the device time that others used
            busy = [max(self._counters.values(), default=self._floor)]
        self._floor = max(self._floor, min(busy, default=self._floor))
        for tenant in [name for name, at in self._counters.items() if at <= self._floor]:
            if tenant not in waiting:
                del self._counters[tenant]
                self._last_batch.pop(tenant, None)
                self.sampling_lead_s.pop(tenant, None)
        for tenant in waiting:
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)

    def lift(self, tenants: Iterable[str]) -> None:
        """Lift these tenants to the floor, which does not move."""
        for tenant in tenants:
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)

    def counters_after(
        self, batch: Sequence[Job], seconds: float, shares: Sequence[float]
    ) -> dict[str, float]:
        """Return the counters of the batch's tenants after the batch; ``shares`` add up to 1."""
        of_tenant: dict[str, float] = {}
        for job, share in zip(batch, shares, strict=True):
            of_tenant[job.tenant] = of_tenant.get(job.tenant, 0.0) + share
        return {
            tenant: self._counters.get(tenant, self._floor)
            + seconds * share / self._weights.get(tenant, 1.0)
            for tenant, share in of_tenant.items()
        }

    def charge(self, batch: Sequence[Job], seconds: float, shares: Sequence[float]) -> None:
        """Charge the tenants of a batch that took ``seconds`` of the device."""
        self._batches += 1
        charged = self.counters_after(batch, seconds, shares)
        # A tenant without a decode slot cannot use its turn, and must not keep it from others.
        served = {job.tenant for job, share in zip(batch, shares, strict=True) if share}
        lowest = min(charged[tenant] for tenant in served)
        self._counters |= {tenant: max(at, lowest) for tenant, at in charged.items()}
        self.largest_s = max(self.largest_s, seconds * max(shares))
        self._last_batch |= {job.tenant: self._batches for job in batch}
        for job, share in zip(batch, shares, strict=True):
            lead_s = seconds * share if job.kind == JobKind.SAMPLE else -seconds * share
            self.sampling_lead_s[job.tenant] = self.sampling_lead_s.get(job.tenant, 0.0) + lead_s

    def is_near(self, tenant: str, lowest: float, batch_s: float) -> bool:
        """Return whether the tenant is at most one request, or ``batch_s``, ahead of ``lowest``."""
        ahead_s = (self.counter(tenant) - lowest) * self.weight(tenant)
        return ahead_s <= max(batch_s, self.largest_s)
