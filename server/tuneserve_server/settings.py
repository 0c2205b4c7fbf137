"""Settings of the API process: ``CommonSettings`` and what only the API needs."""

import ipaddress
from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tuneserve_engine.config import CommonSettings
from tuneserve_engine.queue.base import SweepPolicy

Port = Annotated[int, Field(ge=1, le=65535)]
MIB = 1024 * 1024


class ApiSettings(CommonSettings):
    """Settings of ``tuneserve api``."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; loopback only.")
    port: Port = Field(default=8410, description="Port to listen on.")
    public_url: str | None = Field(
        default=None,
        description="Address clients use, for download links; default: the one they called.",
    )

    poll_s: Annotated[float, Field(gt=0, le=40)] = Field(
        default=25.0, description="How long a poll for a result is held; clients give up at 45 s."
    )
    max_body_bytes: PositiveInt = Field(
        default=16 * MIB, description="Largest request body as sent."
    )
    max_decompressed_bytes: PositiveInt = Field(
        default=64 * MIB, description="Largest request body after decompression."
    )
    header_timeout_s: PositiveFloat = Field(
        default=10.0, description="Time within which the headers of a request must arrive."
    )
    body_timeout_s: PositiveFloat = Field(
        default=30.0,
        description="Time within which a request body must arrive, plus a second per 16 KiB of it.",
    )
    keep_alive_s: Annotated[int, Field(ge=75)] = Field(
        default=120, description="How long an idle connection stays open."
    )

    lora_alpha: PositiveFloat = Field(
        default=32.0, description="LoRA alpha of new models; scale = alpha / rank."
    )

    sweep_s: PositiveFloat = Field(
        default=5.0, description="Time between clean-ups of the store and the files."
    )
    session_ttl_s: Annotated[float, Field(ge=120)] = Field(
        default=900.0, description="A session without heartbeat for this long ends."
    )
    gap_ttl_s: Annotated[float, Field(ge=300)] = Field(
        default=600.0, description="Requests that wait this long for an earlier one fail."
    )
    result_ttl_s: Annotated[float, Field(ge=600)] = Field(
        default=86_400.0, description="How long results stay readable."
    )
    download_ttl_s: NonNegativeInt = Field(
        default=900, description="How long a signed download link works."
    )

    @model_validator(mode="after")
    def _loopback_only(self) -> Self:
        if not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is not a loopback address. This server accepts any API key, "
                "so it may only listen where nobody else can reach it: use 127.0.0.1, and an SSH "
                "tunnel or an authenticating proxy for other machines"
            )
        return self

    @property
    def url(self) -> str:
        """Where this server is reached from this machine."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def sweep_policy(self) -> SweepPolicy:
        return SweepPolicy(
            session_ttl_s=self.session_ttl_s,
            gap_ttl_s=self.gap_ttl_s,
            result_ttl_s=self.result_ttl_s,
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
