"""The limits and times of a deployment, with their defaults."""

from dataclasses import dataclass

SLICE_S = 0.1
"""The time that one micro-batch of a long request takes, in seconds, about. Another tenant's
request waits at most so long before it runs in between."""

RESERVE_BYTES = 32 * 2**20
"""Disk space for the write-ahead log between two checkpoints, and as much for the database."""


@dataclass(frozen=True)
class StorePolicy:
    """The limits and times of the store, the same in every process of a deployment.

    Limits in a ``TenantRecord`` override them. Bytes are payload bytes, and jobs are jobs that have
    not ended. A limit of bytes never refuses the only job of its scope, and only the server's
    limits refuse the job that a model waits for.
    """

    lease_ttl_s: float = 6.0  # a worker silent for this long has lost its models to the others
    job_attempts: int = 3  # workers that may die while they run a job
    model_jobs: int = 256
    model_bytes: int = 64 * 2**20
    tenant_jobs: int = 1024
    tenant_bytes: int = 256 * 2**20
    tenant_models: int = 32  # that are neither ended nor parked
    waiting_models: int = 32  # of a tenant, created once one of its other models parks or ends
    server_jobs: int = 10_000
    server_bytes: int = 2 * 2**30
    tenant_refusals: int = 2000  # refused requests an hour that are stored with the reason
    tenant_sessions: int = 1000  # that have not ended
    server_sessions: int = 20_000
    tenant_sessions_a_minute: int = 120  # sessions created, whether they have ended or not
    tenant_samplers_a_minute: int = 600
    session_samplers: int = 10_000  # of one session, unnamed saves included
    tenant_samplers: int = 20_000  # of all its sessions that have not ended
    tenant_checkpoints: int = 1000  # unnamed saves and saves under way included
    tenant_checkpoint_bytes: int = 50 * 2**30  # total size from which on saves are refused

    @property
    def model_window(self) -> int:
        """The number of a model's positions that may be taken, from the first missing one on.

        It bounds the number of jobs to release at once when the missing one comes.
        """
        return 4 * self.model_jobs


@dataclass(frozen=True)
class SweepPolicy:
    session_ttl_s: float = 604_800.0  # a session silent for this long ends, with its models
    park_s: float = 900.0  # a model without requests for this long is released by its worker
    sample_ttl_s: float = 120.0  # queued samples of a session silent for this long are dropped
    gap_ttl_s: float = 600.0
    result_ttl_s: float = 86_400.0  # the request itself is forgotten after twice this time
    recording_ttl_s: float = 86_400.0  # a recording that no training used for this long is dropped
    recording_bytes: int = 256 * 2**20  # of one tenant's recordings; the last used ones stay
    ended_session_ttl_s: float = 2_592_000.0  # after the session's last sign of life
    set_back_s: float = 0.0  # how far the clock was set back since the last sweep


@dataclass(frozen=True)
class UnusedPolicy:
    quarantine_s: float = 259_200.0
    max_share: float = 0.1
