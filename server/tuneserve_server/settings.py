"""The settings of the API process: ``CommonSettings`` and the settings only the API needs."""

import ipaddress
import re
from typing import Annotated, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_settings import NoDecode

from tuneserve_engine.core.policies import StorePolicy, SweepPolicy, UnusedPolicy
from tuneserve_engine.settings.common import CommonSettings, from_json

Port = Annotated[int, Field(ge=1, le=65535)]
MIB = 1024 * 1024
GIB = 1024 * MIB


class ApiSettings(CommonSettings):
    """The settings of ``tuneserve api``."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on; loopback only, unless API keys are required or "
        "`trusted_network` is set.",
    )
    port: Port = Field(default=8410, description="Port to listen on.")
    trusted_network: bool = Field(
        default=False,
        description="The operator vouches that nobody reaches `host` who may not use every "
        "tenant's models, because a firewall, a container's network or an authenticating proxy is "
        "in between: as long as there are no API keys, any is accepted.",
    )
    require_keys: bool = Field(
        default=False,
        description="Let in only the keys that `tuneserve keys create` has made. So it is anyway "
        "once there is one.",
    )
    public_url: str | None = Field(
        default=None,
        description="Address clients use, for download links; default: the one they called.",
    )

    allowed_hosts: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Names, beside localhost, IP addresses, `host` and that of `public_url`, under "
        "which this server is called, separated by commas: box.lan, or *.example.org for all below "
        "it, or * for any. Without keys, requests to other names are refused, so that no other "
        "site's page can reach this server from a browser; with keys, only those for what needs "
        "none: the live page, `/metrics` and `/api/v1/healthz`.",
    )
    trusted_proxies: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Addresses or networks (10.0.0.0/8) of reverse proxies whose `X-Forwarded-For` "
        "and `X-Forwarded-Proto` are believed, separated by commas. Without it, the address of a "
        "client is that of its connection.",
    )

    poll_s: Annotated[float, Field(gt=0, le=40)] = Field(
        default=25.0, description="How long a poll for a result is held; clients give up at 45 s."
    )
    retrieve_futures: bool = Field(
        default=False,
        description="Has clients wait for all their samples with one poll, in place of one each. "
        "Good for thousands at once; one alone takes some 10 ms longer.",
    )
    max_body_bytes: PositiveInt = Field(
        default=16 * MIB, description="Largest request body as sent."
    )
    max_decompressed_bytes: PositiveInt = Field(
        default=64 * MIB, description="Largest request body after decompression."
    )
    body_memory_bytes: PositiveInt = Field(
        default=512 * MIB,
        description="Memory of one API process for request bodies on their way in, by what they "
        "are decompressed or parsed to: a quarter for those that arrive, the rest for those that "
        "have. Those up to 4 KiB do not count.",
    )
    tenant_body_memory_bytes: PositiveInt = Field(
        default=256 * MIB, description="What one tenant may take of it."
    )
    text_memory_bytes: PositiveInt = Field(
        default=256 * MIB,
        description="Memory of one API process for making tokens of text, half of it for one "
        "tenant; a character of the longest text counts as 200 bytes.",
    )
    max_import_bytes: PositiveInt = Field(
        default=4 * GIB,
        description="Largest PEFT adapter that is taken in, as sent; nothing else is as large.",
    )
    header_timeout_s: PositiveFloat = Field(
        default=10.0, description="Time within which the headers of a request must arrive."
    )
    body_timeout_s: PositiveFloat = Field(
        default=10.0,
        description="Time that may go by without any more of a request body, or that it may fall "
        "behind 16 KiB a second.",
    )
    keep_alive_s: Annotated[int, Field(ge=75)] = Field(
        default=120, description="How long an idle connection stays open."
    )

    max_polls_per_tenant: PositiveInt = Field(
        default=4096,
        description="Polls of one tenant that one API process holds; those beyond are ended after "
        "a second.",
    )

    max_model_jobs: PositiveInt = Field(
        default=StorePolicy.model_jobs, description="Requests of one model that have not ended."
    )
    max_model_bytes: PositiveInt = Field(
        default=StorePolicy.model_bytes, description="Bytes of them."
    )
    max_tenant_jobs: PositiveInt = Field(
        default=StorePolicy.tenant_jobs, description="Requests of one tenant that have not ended."
    )
    max_tenant_bytes: PositiveInt = Field(
        default=StorePolicy.tenant_bytes, description="Bytes of them."
    )
    max_tenant_models: PositiveInt = Field(
        default=StorePolicy.tenant_models,
        description="Models of one tenant in use: neither ended nor parked. For one more, the "
        "idlest is parked; if too few are idle, new ones wait for room.",
    )
    max_waiting_models: PositiveInt = Field(
        default=StorePolicy.waiting_models,
        description="New models of one tenant that wait for room; 429 beyond.",
    )
    max_server_jobs: PositiveInt = Field(
        default=StorePolicy.server_jobs, description="Requests of all tenants that have not ended."
    )
    max_server_bytes: PositiveInt = Field(
        default=StorePolicy.server_bytes,
        description="Bytes of them; with SQLite at most a quarter of the disk space free at start, "
        "or a sixteenth of the disk if that is more.",
    )
    max_tenant_refusals: PositiveInt = Field(
        default=StorePolicy.tenant_refusals,
        description="Requests of one tenant that may fail at once within an hour, because they are "
        "wrong. Those beyond get 429 and are not kept.",
    )
    max_tenant_sessions: PositiveInt = Field(
        default=StorePolicy.tenant_sessions,
        description="Sessions of one tenant that have not ended.",
    )
    max_server_sessions: PositiveInt = Field(
        default=StorePolicy.server_sessions,
        description="Sessions of all tenants that have not ended.",
    )
    max_tenant_sessions_a_minute: PositiveInt = Field(
        default=StorePolicy.tenant_sessions_a_minute,
        description="Sessions that one tenant may create within a minute.",
    )
    max_tenant_samplers_a_minute: PositiveInt = Field(
        default=StorePolicy.tenant_samplers_a_minute,
        description="Sampling sessions that one tenant may create within a minute.",
    )
    max_session_samplers: PositiveInt = Field(
        default=StorePolicy.session_samplers,
        description="Sampling sessions of one session, unnamed saves included.",
    )
    max_tenant_samplers: PositiveInt = Field(
        default=StorePolicy.tenant_samplers,
        description="Sampling sessions of one tenant in sessions that have not ended.",
    )
    max_session_metadata_bytes: PositiveInt = Field(
        default=16 * 1024,
        description="Bytes of a session's metadata: its tags, its names and `user_metadata`.",
    )
    max_checkpoints: PositiveInt = Field(
        default=StorePolicy.tenant_checkpoints,
        description="Checkpoints that one tenant may keep, unnamed sampler saves included.",
    )
    max_checkpoint_bytes: PositiveInt = Field(
        default=StorePolicy.tenant_checkpoint_bytes,
        description="Bytes of them at which a tenant can save no more.",
    )
    unnamed_saves: PositiveInt = Field(
        default=4,
        description="Unnamed sampler saves of a model, the newest, that stay where a tenant has "
        "reached its limit of checkpoints.",
    )
    unnamed_save_s: Annotated[float, Field(ge=60)] = Field(
        default=60.0,
        description="Others make room at that limit if no client that uses them was heard of for "
        "this long, those used longest ago first. Below the limit all stay until their session "
        "ends.",
    )
    tenant_budgets: Annotated[dict[str, NonNegativeFloat], NoDecode] = Field(
        default_factory=dict,
        description="Device seconds that tenants may use in a day (UTC), as a JSON object of "
        "names as in `tenant_weights`; then training and sampling are put off with a 402. Who is "
        "not named has no such limit.",
    )
    tenant_metrics: bool = Field(
        default=False,
        description="`/metrics`, which needs no key, shows the device seconds and the queue of "
        "each tenant, by its name.",
    )
    access_log: bool = Field(
        default=False,
        description="A log line for each HTTP request: method, route, status, time, and whose it "
        "was. Clients poll, so there are many.",
    )

    lora_alpha: PositiveFloat = Field(
        default=32.0, description="LoRA alpha of new models; scale = alpha / rank."
    )

    sweep_s: PositiveFloat = Field(
        default=5.0, description="Time between clean-ups of the store and the files."
    )
    quarantine_s: NonNegativeFloat = Field(
        default=UnusedPolicy.quarantine_s,
        description="How long files that nothing names, and that nothing is known to have let go "
        "of, lie in `quarantine/` of the files before they are deleted; and how long a store that "
        "was copied or moved spares the files that it finds.",
    )
    max_unused_share: Annotated[float, Field(ge=0, le=1)] = Field(
        default=UnusedPolicy.max_share,
        description="Share of the files that may be in quarantine; what would make more, and more "
        "than 16 files, stays until the operator runs `tuneserve files clean`.",
    )
    park_s: PositiveFloat = Field(
        default=SweepPolicy.park_s,
        description="A model without requests for this long leaves the worker's memory; its next "
        "request brings it back.",
    )
    sample_ttl_s: Annotated[float, Field(ge=60)] = Field(
        default=SweepPolicy.sample_ttl_s,
        description="Queued samples of a session without heartbeat or poll for this long fail.",
    )
    session_ttl_s: Annotated[float, Field(ge=120)] = Field(
        default=SweepPolicy.session_ttl_s,
        description="A session without heartbeat or poll for this long ends, and its models.",
    )
    ended_session_ttl_s: Annotated[float, Field(ge=3600)] = Field(
        default=SweepPolicy.ended_session_ttl_s,
        description="How long a session that ended stays listed after its last sign of life, with "
        "its models and their curves; a model that has checkpoints stays as long as these.",
    )
    gap_ttl_s: Annotated[float, Field(ge=300)] = Field(
        default=SweepPolicy.gap_ttl_s,
        description="Requests that wait this long for an earlier one fail.",
    )
    result_ttl_s: Annotated[float, Field(ge=600)] = Field(
        default=SweepPolicy.result_ttl_s, description="How long results stay readable."
    )
    stable_reinforce: bool = Field(
        default=True,
        description="Offers the loss `stable_reinforce`, by a formula of our own (the vendor's is "
        "not public), and records for it what is sampled with `record_stability_info`.",
    )
    recording_ttl_s: Annotated[float, Field(ge=600)] = Field(
        default=SweepPolicy.recording_ttl_s,
        description="How long what was recorded of samples is kept after training used it last.",
    )
    max_recording_bytes: PositiveInt = Field(
        default=SweepPolicy.recording_bytes,
        description="Bytes that are recorded of one tenant's samples, 8 a token and 512 a sample; "
        "then those used longest ago are dropped. With Redis they are in its memory.",
    )
    download_ttl_s: NonNegativeInt = Field(
        default=900, description="How long a signed download link works."
    )

    @field_validator("tenant_budgets", mode="before")
    @classmethod
    def _from_json(cls, given: object) -> object:
        return from_json(given)

    @field_validator("allowed_hosts", "trusted_proxies", mode="before")
    @classmethod
    def _from_text(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        return [part.strip() for part in given.split(",") if part.strip()]

    @field_validator("allowed_hosts")
    @classmethod
    def _bare_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+", name):
                raise ValueError(
                    f"{name!r} is no host name: give it without scheme, port and path, as in "
                    "box.lan or *.example.org"
                )
        return names

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, proxies: list[str]) -> list[str]:
        for proxy in proxies:
            ipaddress.ip_network(proxy)  # its ValueError names the text
        return proxies

    @model_validator(mode="after")
    def _bodies_fit(self) -> Self:
        own = min(self.tenant_body_memory_bytes, self.body_memory_bytes)
        needed = max(8 * self.max_body_bytes, 8 * self.max_decompressed_bytes // 3)
        if own < needed:
            raise ValueError(
                f"of tenant_body_memory_bytes, a tenant has {own} bytes; a body of the largest "
                f"size (max_body_bytes, max_decompressed_bytes) needs {needed}; raise it, and "
                "body_memory_bytes to at least as much"
            )
        return self

    @property
    def may_be_open(self) -> bool:
        """Whether the server may listen without API keys."""
        return self.trusted_network or self.is_loopback

    @property
    def is_loopback(self) -> bool:
        """Whether ``host`` is a loopback address, which only this machine reaches."""
        return _is_loopback(self.host)

    @property
    def url(self) -> str:
        """The address at which this machine reaches the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def store_policy(self) -> StorePolicy:
        """The limits and times of the store."""
        return StorePolicy(
            lease_ttl_s=self.lease_ttl_s,
            job_attempts=self.job_attempts,
            model_jobs=self.max_model_jobs,
            model_bytes=self.max_model_bytes,
            tenant_jobs=self.max_tenant_jobs,
            tenant_bytes=self.max_tenant_bytes,
            tenant_models=self.max_tenant_models,
            waiting_models=self.max_waiting_models,
            server_jobs=self.max_server_jobs,
            server_bytes=self.max_server_bytes,
            tenant_refusals=self.max_tenant_refusals,
            tenant_sessions=self.max_tenant_sessions,
            server_sessions=self.max_server_sessions,
            tenant_sessions_a_minute=self.max_tenant_sessions_a_minute,
            tenant_samplers_a_minute=self.max_tenant_samplers_a_minute,
            session_samplers=self.max_session_samplers,
            tenant_samplers=self.max_tenant_samplers,
            tenant_checkpoints=self.max_checkpoints,
            tenant_checkpoint_bytes=self.max_checkpoint_bytes,
        )

    @property
    def unused_policy(self) -> UnusedPolicy:
        return UnusedPolicy(self.quarantine_s, self.max_unused_share)

    @property
    def sweep_policy(self) -> SweepPolicy:
        return SweepPolicy(
            park_s=self.park_s,
            sample_ttl_s=self.sample_ttl_s,
            session_ttl_s=self.session_ttl_s,
            gap_ttl_s=self.gap_ttl_s,
            result_ttl_s=self.result_ttl_s,
            recording_ttl_s=self.recording_ttl_s,
            recording_bytes=self.max_recording_bytes,
            ended_session_ttl_s=self.ended_session_ttl_s,
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
