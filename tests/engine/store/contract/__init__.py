"""The guarantees of every store, as tests.

A store's test module subclasses ``StoreContract``, or ``DurableStoreContract`` if the store
outlives its process, and says how to open it.
"""

import pytest

_PARTS = [
    *"bench durability forgetting jobs keeping leases limits placement points progress".split(),
    *"records recordings refusals retention samples sessions usage".split(),
]
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from tests.engine.store.contract.bench import Bench, Clock, scenario  # noqa: E402
from tests.engine.store.contract.durability import DurabilityContract  # noqa: E402
from tests.engine.store.contract.forgetting import ForgettingContract  # noqa: E402
from tests.engine.store.contract.jobs import JobsContract  # noqa: E402
from tests.engine.store.contract.keeping import KeepingContract  # noqa: E402
from tests.engine.store.contract.leases import LeasesContract  # noqa: E402
from tests.engine.store.contract.limits import LimitsContract  # noqa: E402
from tests.engine.store.contract.placement import PlacementContract  # noqa: E402
from tests.engine.store.contract.publish import ProgressContract  # noqa: E402
from tests.engine.store.contract.recordings import RecordingsContract  # noqa: E402
from tests.engine.store.contract.records import RecordsContract  # noqa: E402
from tests.engine.store.contract.recovery_points import PointsContract  # noqa: E402
from tests.engine.store.contract.refusals import RefusalsContract  # noqa: E402
from tests.engine.store.contract.retention import RetentionContract  # noqa: E402
from tests.engine.store.contract.samples import SamplesContract  # noqa: E402
from tests.engine.store.contract.sessions import SessionsContract  # noqa: E402
from tests.engine.store.contract.usage import UsageContract  # noqa: E402

__all__ = ["Bench", "Clock", "DurableStoreContract", "StoreContract", "scenario"]


class StoreContract(
    JobsContract,
    PlacementContract,
    LeasesContract,
    PointsContract,
    LimitsContract,
    KeepingContract,
    RecordsContract,
    RecordingsContract,
    ProgressContract,
    SamplesContract,
    SessionsContract,
    ForgettingContract,
    RefusalsContract,
    RetentionContract,
    UsageContract,
):
    """Everything except what survives the store's process."""


class DurableStoreContract(StoreContract, DurabilityContract):
    """Everything, including what survives the store's process."""
