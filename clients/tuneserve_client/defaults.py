"""The server and the key of a client that names none."""

DEFAULT_URL = "http://127.0.0.1:8410"
OPEN_KEY = "tml-local"
"""The key of the local tenant, which a server without keys accepts."""
