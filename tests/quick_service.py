"""Settings of a service that is ready soon, for tests of its clients."""

QUICK = {"compile_ahead": "false", "chunk_tokens": "64"}
"""Programs compile fast and on demand; ``tests/conftest.py`` makes all services share them."""
