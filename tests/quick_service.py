"""Settings of a service that is ready soon, for tests of its clients."""

import pytest


def quick_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings for programs that compile fast, on demand, and once for all services of a test
    run.
    """
    return {
        "compile_ahead": "false",
        "chunk_tokens": "64",
        "compile_cache": str(tmp_path_factory.getbasetemp() / "compiled"),
    }
