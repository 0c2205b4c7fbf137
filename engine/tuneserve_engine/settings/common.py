"""The settings that the API process and the worker share.

Each field is read from ``TUNESERVE_<NAME>`` or ``tuneserve.toml``; command-line flags override.
"""

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from tuneserve_engine.core.policies import RESERVE_BYTES, StorePolicy
from tuneserve_engine.settings.units import plain

TINY_MODEL = Path(__file__).parents[1] / "tiny_model"
SETTINGS_FILE = "tuneserve.toml"  # in the working directory
STORE_SCHEMES = ("redis://", "rediss://", "unix://")


class CommonSettings(BaseSettings):
    """The settings on which the API process and the worker must agree."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix="TUNESERVE_",
        toml_file=SETTINGS_FILE,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,  # a store's address can hold a password
    )

    data_dir: Path = Field(
        default=Path("data"),
        description="Directory that holds the store, checkpoints and compiled programs.",
    )
    files_dir: Path = Field(
        default_factory=lambda known: known["data_dir"] / "files",
        description="Directory that holds checkpoints and recovery points. With several hosts, it "
        "must be a directory that all of them share, unless files_url is set. Default: files/ in "
        "the data directory.",
    )
    files_url: str = Field(
        default="",
        description="Bucket that holds checkpoints and recovery points instead of files_dir: "
        "s3://bucket/prefix. The directory then holds copies of files, and uploads in progress. "
        "Credentials, region and endpoint come from the environment (AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL and others).",
    )
    files_cache_bytes: NonNegativeInt = Field(
        default=50 * 2**30,
        description="Disk space in bytes for local copies of files in a bucket (files_url). The "
        "least recently used ones are removed first, and none within an hour of its last use.",
    )
    group_access: bool = Field(
        default=False,
        description="Share checkpoints, recovery points and decompositions with the group of their "
        "directory (modes 0660 and 2770). Otherwise only their owner has access (0600 and 0700). "
        "Set it where API processes and workers run as different users.",
    )
    store: str = Field(
        default="",
        repr=False,
        description="Address of the Redis server that is the store (redis://, rediss:// or "
        "unix://). Empty: SQLite in the data directory.",
    )
    store_check_s: NonNegativeFloat = Field(
        default=120.0,
        description="Time limit in seconds for the check of the SQLite store's file. The check "
        "runs in the background after each start of the API process. 0 turns it off.",
    )
    store_durability_asserted: bool = Field(
        default=False,
        description="Confirm that Redis writes to disk before it answers. Needed only if Redis "
        "does not allow its settings to be read.",
    )
    store_reserve_bytes: NonNegativeInt = Field(
        default=RESERVE_BYTES,
        description="Disk space in bytes that a SQLite store sets aside in store.reserve. On a "
        "full disk, the service uses it to finish requests, to delete checkpoints and to start. 0 "
        "sets nothing aside.",
    )
    min_free_bytes: NonNegativeInt = Field(
        default=2**30,
        description="Free disk space in bytes below which the API answers requests with 503 for "
        "the time being. Below it, no checkpoints, evicted adapters, decompositions or compiled "
        "programs are written.",
    )
    lease_ttl_s: Annotated[float, Field(ge=1)] = Field(
        default=StorePolicy.lease_ttl_s,
        description="Time in seconds after which a silent worker loses its models to other "
        "workers.",
    )
    job_attempts: PositiveInt = Field(
        default=StorePolicy.job_attempts,
        description="Number of workers that may die while they run a request before the request "
        "fails.",
    )
    base_model: str = Field(
        default=str(TINY_MODEL),
        description="Base model: a directory in Hugging Face layout, or a hub id.",
    )
    base_model_revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of a base model from the hub; a commit is best. The "
        "store remembers the commit that a name was first served with, and refuses workers with "
        "any other. Default: the main branch.",
    )
    base_model_name: str | None = Field(
        default=None,
        description="Name under which the base model is served. Default: the hub id, or the name "
        "of the directory.",
    )
    base_model_tokenizer: str | None = Field(
        default=None,
        description="Place from which clients load the tokenizer: a hub id, or a path on their "
        "machines. Default: the base model's hub id, also for a directory in the hub's cache. For "
        "any other directory, the default is its path on this machine, which other machines do not "
        "have.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest severity of the log lines to print."
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="Format of log lines: text for people, or one JSON object per line for "
        "programs.",
    )

    otel: str = Field(
        default_factory=lambda: os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
        description="Address of an OpenTelemetry collector (OTLP over HTTP, http://host:4318) that "
        "receives a trace of each request. Needs `tuneserve[otel]`. Default: the value of "
        "`OTEL_EXPORTER_OTLP_ENDPOINT`. Without either, no traces are sent.",
    )

    @property
    def served_name(self) -> str:
        """The base model's public name."""
        if self.base_model_name:
            return self.base_model_name
        if self.base_model == str(TINY_MODEL):
            return "tuneserve/tiny"
        path = Path(self.base_model)
        return path.resolve().name if path.is_dir() else self.base_model

    @property
    def tokenizer_id(self) -> str:
        """The tokenizer of this service's processes: the local directory, or the hub id."""
        path = Path(self.base_model)
        return str(path.resolve()) if path.is_dir() else self.base_model

    @property
    def client_tokenizer_id(self) -> str:
        """The hub id or path from which clients should load the tokenizer."""
        return self.base_model_tokenizer or _hub_id(self.tokenizer_id) or self.tokenizer_id

    @property
    def local_tokenizer(self) -> str | None:
        """A warning for the operator if clients on other machines cannot load the tokenizer.

        None if they can load it from ``client_tokenizer_id``, or if the operator chose the latter.
        """
        folder = self.client_tokenizer_id
        if self.base_model_tokenizer or not Path(folder).is_absolute():
            return None
        return (
            f"clients on other machines look for the tokenizer of {self.served_name} in {folder}, "
            "which they do not have: set base_model_tokenizer to a hub id, or give them the files "
            "of /api/v1/tokenizer (docs/api.md#tokenizers)"
        )

    @property
    def files_shown(self) -> str:
        """The bucket or directory of files."""
        return self.files_url or str(self.files_dir)

    @property
    def store_kind(self) -> Literal["sqlite", "redis"]:
        return "redis" if self.store else "sqlite"

    @property
    def store_shown(self) -> str:
        """The address or file of the store, without a password."""
        return without_password(self.store) if self.store else str(self.store_file)

    @property
    def store_file(self) -> Path:
        """The file of the SQLite store."""
        return self.data_dir / "store.db"

    @property
    def store_socket(self) -> Path:
        """The socket on which workers reach the SQLite store of the API process."""
        return self.data_dir / "store.sock"

    @property
    def admin_socket(self) -> Path:
        """The socket on which the API process takes commands about keys and tenants."""
        return self.data_dir / "admin.sock"

    @property
    def store_policy(self) -> StorePolicy:
        """The part of the store's policy that this process needs to open the store."""
        return StorePolicy(lease_ttl_s=self.lease_ttl_s, job_attempts=self.job_attempts)

    @field_validator("*", mode="before")
    @classmethod
    def _with_unit(cls, value: Any, info: ValidationInfo) -> Any:
        return plain(info.field_name or "", value) if isinstance(value, str) else value

    @field_validator("files_url")
    @classmethod
    def _known_files(cls, url: str) -> str:
        if url and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+[a-z0-9](/[\w.=+-]+)*/?", url):
            raise ValueError(
                "it must be empty, for files in files_dir, or a bucket with or without a prefix, "
                "s3://bucket/prefix, without credentials: those are in AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY"
            )
        return url.rstrip("/")

    @field_validator("otel")
    @classmethod
    def _collector(cls, address: str) -> str:
        if address and not address.startswith(("http://", "https://")):
            raise ValueError("it must be the address of a collector, http://host:4318, or empty")
        return address

    @field_validator("store")
    @classmethod
    def _known_store(cls, store: str) -> str:
        if store and not store.startswith(STORE_SCHEMES):
            raise ValueError(
                "it must be empty, for SQLite in the data directory, or the address of a Redis "
                "server: redis://host:6379/0, rediss://… or unix://…"
            )
        return store

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def _hub_id(folder: str) -> str | None:
    """Return the hub id of a directory in the hub's cache; None for any other directory.

    A directory in the cache is .../models--Org--Name/snapshots/REVISION.
    """
    found = re.search(r"/models--([^/]+)/snapshots/[^/]+$", folder)
    return found and found[1].replace("--", "/")


def from_json(given: object) -> object:
    """Return the table in the text of a setting. Raises ``ValueError`` for invalid JSON."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given or "{}")
    except ValueError as error:
        raise ValueError(f"it is not a JSON object: {error}") from None


def from_commas(given: object) -> object:
    """Return the parts of the text of a setting that commas separate."""
    if not isinstance(given, str):
        return given
    return [part.strip() for part in given.split(",") if part.strip()]


def without_password(address: str) -> str:
    """Return the address of a store without its password, whatever the address looks like."""
    address = re.sub(r"^([a-z]+://)?.*@", r"\1***@", address, flags=re.DOTALL)
    return re.sub(r"(password=)[^&]*", r"\1***", address)
