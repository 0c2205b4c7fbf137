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
from tuneserve_engine.settings.common import CommonSettings, from_commas, from_json

Port = Annotated[int, Field(ge=1, le=65535)]
MIB = 1024 * 1024
GIB = 1024 * MIB


class ApiSettings(CommonSettings):
    """The settings of ``tuneserve api``."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. It must be a loopback address unless API keys are "
        "required or `trusted_network` is set.",
    )
    port: Port = Field(default=8410, description="Port to listen on.")
    trusted_network: bool = Field(
        default=False,
        description="Confirm that only people who may use every tenant's models can reach `host`, "
        "because a firewall, a container network or an authenticating proxy protects it. The "
        "server then accepts any key on this address until the first API key is created.",
    )
    require_keys: bool = Field(
        default=False,
        description="Accept only keys that `tuneserve keys create` made. Once such a key exists, "
        "this is always so.",
    )
    public_url: str | None = Field(
        default=None,
        description="Address of the server in download links. Default: the address that the client "
        "called.",
    )

    allowed_hosts: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Names under which clients call this server, separated by commas: box.lan, or "
        "*.example.org for all names below it, or * for any name. localhost, IP addresses, `host` "
        "and the name in `public_url` are always allowed. Without keys, requests to other names "
        "are refused, so a page of another site cannot reach this server from a browser. With "
        "keys, other names are refused only on the paths that need no key: the dashboard, "
        "`/metrics` and `/api/v1/healthz`.",
    )
    trusted_proxies: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Addresses or networks (10.0.0.0/8) of reverse proxies, separated by commas. "
        "The server believes `X-Forwarded-For` and `X-Forwarded-Proto` only from them. Without "
        "this setting, the address of a client is the address of its connection.",
    )

    poll_s: Annotated[float, Field(gt=0, le=40)] = Field(
        default=25.0,
        description="Time in seconds for which a poll for a result is held. Clients give up after "
        "45 s.",
    )
    retrieve_futures: bool = Field(
        default=False,
        description="Let clients wait for all their samples with one poll, instead of one poll per "
        "sample. This helps with thousands of samples at once. A single sample takes about 10 ms "
        "longer.",
    )
    token_auth: bool = Field(
        default=False,
        description="Let SDKs exchange their key for tokens that expire after an hour, and send "
        "these. `tinker auth whoami` needs this.",
    )
    max_body_bytes: PositiveInt = Field(
        default=16 * MIB, description="Largest request body in bytes, as sent."
    )
    max_decompressed_bytes: PositiveInt = Field(
        default=64 * MIB, description="Largest request body in bytes, after decompression."
    )
    body_memory_bytes: PositiveInt = Field(
        default=512 * MIB,
        description="Memory in bytes of one API process for request bodies: a quarter for bodies "
        "that are arriving, the rest for bodies that have arrived, by their decompressed or parsed "
        "size. Bodies of up to 4 KiB do not count.",
    )
    tenant_body_memory_bytes: PositiveInt = Field(
        default=256 * MIB, description="Part of `body_memory_bytes` that one tenant may take."
    )
    text_memory_bytes: PositiveInt = Field(
        default=256 * MIB,
        description="Memory in bytes of one API process for tokenizing texts, half of it for any "
        "one tenant. A request counts 200 bytes per character of its longest text.",
    )
    max_import_bytes: PositiveInt = Field(
        default=4 * GIB,
        description="Largest PEFT adapter in bytes that can be imported, as sent. No other request "
        "body may be as large.",
    )
    header_timeout_s: PositiveFloat = Field(
        default=10.0,
        description="Time in seconds within which the headers of a request must arrive.",
    )
    body_timeout_s: PositiveFloat = Field(
        default=10.0,
        description="Time in seconds for which a request body may pause, or by which it may fall "
        "behind a rate of 16 KiB per second.",
    )
    keep_alive_s: Annotated[int, Field(ge=75)] = Field(
        default=120, description="Time in seconds for which an idle connection stays open."
    )

    max_polls_per_tenant: PositiveInt = Field(
        default=4096,
        description="Number of polls that one API process holds for one tenant. Further polls end "
        "after a second.",
    )

    max_model_jobs: PositiveInt = Field(
        default=StorePolicy.model_jobs,
        description="Largest number of unfinished requests of one model.",
    )
    max_model_bytes: PositiveInt = Field(
        default=StorePolicy.model_bytes,
        description="Largest total size in bytes of the unfinished requests of one model.",
    )
    max_tenant_jobs: PositiveInt = Field(
        default=StorePolicy.tenant_jobs,
        description="Largest number of unfinished requests of one tenant.",
    )
    max_tenant_bytes: PositiveInt = Field(
        default=StorePolicy.tenant_bytes,
        description="Largest total size in bytes of the unfinished requests of one tenant.",
    )
    max_tenant_models: PositiveInt = Field(
        default=StorePolicy.tenant_models,
        description="Number of models that one tenant may have in use: models that are neither "
        "ended nor parked. For one more, the model that has been idle longest is parked. If too "
        "few models are idle, the new model waits for room.",
    )
    max_waiting_models: PositiveInt = Field(
        default=StorePolicy.waiting_models,
        description="Number of new models of one tenant that may wait for room. Further models are "
        "refused with 429.",
    )
    max_server_jobs: PositiveInt = Field(
        default=StorePolicy.server_jobs,
        description="Largest number of unfinished requests of all tenants.",
    )
    max_server_bytes: PositiveInt = Field(
        default=StorePolicy.server_bytes,
        description="Largest total size in bytes of the unfinished requests of all tenants. With "
        "SQLite, up to a quarter of the disk space that is free at the start, or a sixteenth of "
        "the disk if that is more.",
    )
    max_tenant_refusals: PositiveInt = Field(
        default=StorePolicy.tenant_refusals,
        description="Number of faulty requests of one tenant that may be refused within an hour "
        "and stored with the reason. Further faulty requests get 429 and are not stored.",
    )
    max_tenant_sessions: PositiveInt = Field(
        default=StorePolicy.tenant_sessions,
        description="Largest number of open sessions of one tenant.",
    )
    max_server_sessions: PositiveInt = Field(
        default=StorePolicy.server_sessions,
        description="Largest number of open sessions of all tenants.",
    )
    max_tenant_sessions_a_minute: PositiveInt = Field(
        default=StorePolicy.tenant_sessions_a_minute,
        description="Number of sessions that one tenant may create per minute.",
    )
    max_tenant_samplers_a_minute: PositiveInt = Field(
        default=StorePolicy.tenant_samplers_a_minute,
        description="Number of sampling sessions that one tenant may create per minute.",
    )
    max_session_samplers: PositiveInt = Field(
        default=StorePolicy.session_samplers,
        description="Largest number of sampling sessions of one session, including unnamed saves.",
    )
    max_tenant_samplers: PositiveInt = Field(
        default=StorePolicy.tenant_samplers,
        description="Largest number of sampling sessions in all open sessions of one tenant.",
    )
    max_session_metadata_bytes: PositiveInt = Field(
        default=16 * 1024,
        description="Largest size in bytes of a session's metadata: its tags, its names and "
        "`user_metadata`.",
    )
    max_checkpoints: PositiveInt = Field(
        default=StorePolicy.tenant_checkpoints,
        description="Number of checkpoints that one tenant may keep, including unnamed sampler "
        "saves.",
    )
    max_checkpoint_bytes: PositiveInt = Field(
        default=StorePolicy.tenant_checkpoint_bytes,
        description="Total size in bytes of a tenant's checkpoints from which the tenant can save "
        "no more.",
    )
    unnamed_saves: PositiveInt = Field(
        default=4,
        description="Number of unnamed sampler saves of each model, the newest ones, that stay "
        "even when the tenant reaches its limit of checkpoints.",
    )
    unnamed_save_s: Annotated[float, Field(ge=60)] = Field(
        default=60.0,
        description="Time in seconds without a sign of life from its clients after which an older "
        "unnamed sampler save may be deleted, if the tenant has reached its limit of checkpoints. "
        "The saves that were used longest ago go first. Below the limit, all of them stay until "
        "their session ends.",
    )
    tenant_budgets: Annotated[dict[str, NonNegativeFloat], NoDecode] = Field(
        default_factory=dict,
        description="Device seconds that tenants may use in a day (UTC), as a JSON object of "
        "tenant names as in `tenant_weights`. After that, training and sampling are refused with "
        "402 until the next day. Tenants without an entry have no budget.",
    )
    tenant_metrics: bool = Field(
        default=False,
        description="Show the device seconds and the queue of each tenant by name in `/metrics`, "
        "which needs no key.",
    )
    access_log: bool = Field(
        default=False,
        description="Log a line for each HTTP request: method, route, status, time and tenant. "
        "Clients poll, so there are many lines.",
    )

    lora_alpha: PositiveFloat = Field(
        default=32.0, description="LoRA alpha of new models. The scale is alpha / rank."
    )

    sweep_s: PositiveFloat = Field(
        default=5.0, description="Time in seconds between clean-ups of the store and the files."
    )
    quarantine_s: NonNegativeFloat = Field(
        default=UnusedPolicy.quarantine_s,
        description="Time in seconds for which unused files of unknown origin stay in "
        "`quarantine/` of the files directory before they are deleted. A store that was copied or "
        "moved spares the files that it finds for the same time.",
    )
    max_unused_share: Annotated[float, Field(ge=0, le=1)] = Field(
        default=UnusedPolicy.max_share,
        description="Largest share of the files that may be in quarantine. If a clean-up would "
        "exceed both this share and 16 files, it moves nothing until the operator runs `tuneserve "
        "files clean`.",
    )
    park_s: PositiveFloat = Field(
        default=SweepPolicy.park_s,
        description="Time in seconds without requests after which a model leaves the worker's "
        "memory. Its next request restores it.",
    )
    sample_ttl_s: Annotated[float, Field(ge=60)] = Field(
        default=SweepPolicy.sample_ttl_s,
        description="Time in seconds without a heartbeat or poll after which the queued samples of "
        "a session fail.",
    )
    session_ttl_s: Annotated[float, Field(ge=120)] = Field(
        default=SweepPolicy.session_ttl_s,
        description="Time in seconds without a heartbeat or poll after which a session ends, with "
        "its models.",
    )
    ended_session_ttl_s: Annotated[float, Field(ge=3600)] = Field(
        default=SweepPolicy.ended_session_ttl_s,
        description="Time in seconds for which an ended session stays listed after its last sign "
        "of life, with its models and their curves. A model that has checkpoints stays listed as "
        "long as they exist.",
    )
    gap_ttl_s: Annotated[float, Field(ge=300)] = Field(
        default=SweepPolicy.gap_ttl_s,
        description="Time in seconds that a request waits for an earlier one before it fails.",
    )
    result_ttl_s: Annotated[float, Field(ge=600)] = Field(
        default=SweepPolicy.result_ttl_s,
        description="Time in seconds for which results stay readable.",
    )
    stable_reinforce: bool = Field(
        default=True,
        description="Offer the loss `stable_reinforce`, and record the data that it needs from "
        "samples with `record_stability_info`. The formula is our own, because the vendor's is not "
        "public.",
    )
    recording_ttl_s: Annotated[float, Field(ge=600)] = Field(
        default=SweepPolicy.recording_ttl_s,
        description="Time in seconds for which the recorded data of samples is kept after training "
        "last used it.",
    )
    max_recording_bytes: PositiveInt = Field(
        default=SweepPolicy.recording_bytes,
        description="Largest total size in bytes of the recorded data of one tenant's samples: 8 "
        "bytes per token and 512 per sample. Beyond it, the recordings that were used longest ago "
        "are dropped. With Redis, they take its memory.",
    )
    download_ttl_s: NonNegativeInt = Field(
        default=900,
        description="Time in seconds for which a signed link works, for a download or an upload.",
    )

    @field_validator("tenant_budgets", mode="before")
    @classmethod
    def _from_json(cls, given: object) -> object:
        return from_json(given)

    @field_validator("allowed_hosts", "trusted_proxies", mode="before")
    @classmethod
    def _from_text(cls, given: object) -> object:
        return from_commas(given)

    @field_validator("allowed_hosts")
    @classmethod
    def _bare_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+", name):
                raise ValueError(
                    f"{name!r} is not a host name: give it without scheme, port and path, as in "
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
                f"for request bodies, a tenant has {own} bytes; a body of the largest size "
                f"(max_body_bytes, max_decompressed_bytes) needs {needed}; raise "
                "tenant_body_memory_bytes to that, and body_memory_bytes to no less"
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
