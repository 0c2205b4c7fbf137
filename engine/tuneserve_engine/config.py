"""Settings: the only readers of the environment. One frozen object per process.

Each field is read from ``TUNESERVE_<NAME>`` or ``tuneserve.toml``; command-line flags override.
"""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

TINY_MODEL = Path(__file__).parent / "tiny_model"
SETTINGS_FILE = "tuneserve.toml"  # in the working directory

REFUSED = 2
"""Exit status of a process that would fail in the same way if it were started again."""


class CommonSettings(BaseSettings):
    """What the API process and the worker must agree on."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix="TUNESERVE_", toml_file=SETTINGS_FILE, extra="ignore", frozen=True
    )

    data_dir: Path = Field(
        default=Path("data"), description="Holds the store, checkpoints and the compile cache."
    )
    base_model: str = Field(
        default=str(TINY_MODEL),
        description="Directory in Hugging Face layout, or hub id, of the base model.",
    )
    base_model_name: str | None = Field(
        default=None,
        description="Name the base model is served under; default: the hub id, or for a directory "
        "its name.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe log lines shown."
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
        """Where clients find the tokenizer: the local directory, or the hub id."""
        path = Path(self.base_model)
        return str(path.resolve()) if path.is_dir() else self.base_model

    @property
    def store_socket(self) -> Path:
        return self.data_dir / "store.sock"

    @property
    def files_dir(self) -> Path:
        return self.data_dir / "files"

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


class WorkerSettings(CommonSettings):
    """Settings of ``tuneserve worker``."""

    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Type of the base weights and activations."
    )
    max_context_tokens: PositiveInt = Field(
        default=4096,
        description="Longest sequence, samples included, if the base model allows as much; memory "
        "grows with it.",
    )
    batch_tokens: PositiveInt = Field(
        default=1024, description="Tokens of one training micro-batch, padding included."
    )
    max_rows: PositiveInt = Field(default=8, description="Rows of one training micro-batch.")
    sample_rows: PositiveInt = Field(default=8, description="Sequences decoded together.")
    compile_cache: Path | None = Field(
        default=None,
        description="Where compiled programs are kept; default: compiled/ in the data directory.",
    )

    @property
    def compile_cache_dir(self) -> Path:
        return self.compile_cache or self.data_dir / "compiled"
