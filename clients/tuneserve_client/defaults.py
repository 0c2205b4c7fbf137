"""The defaults of this client and of the commands that use it."""

DEFAULT_URL = "http://127.0.0.1:8410"
OPEN_KEY = "tml-local"
"""The key of the local tenant, which a server without keys accepts."""

RANK = 16
LEARNING_RATE = 2e-4
"""Of a new adapter and its steps. The wire keeps the defaults of the official SDK, so this client
always sends its own."""
