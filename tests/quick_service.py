"""Settings for a service that is soon ready, for tests of what uses it."""

import pytest


def quick_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Programs that compile fast, when they are needed, and once for all services of a run."""
    return {
        "compile_ahead": "false",
        "chunk_tokens": "64",
        "compile_cache": str(tmp_path_factory.getbasetemp() / "compiled"),
    }
