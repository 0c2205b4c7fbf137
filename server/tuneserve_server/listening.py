"""The socket of the API. Commands that only try the port do not load the application."""

import socket

from tuneserve_server.settings import ApiSettings


class CannotStart(Exception):
    """A fault of the environment or the settings that prevents the start."""


def listen(settings: ApiSettings) -> socket.socket:
    """Return the bound socket of the API. Raises ``CannotStart`` if it cannot be bound."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise CannotStart(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; stop the "
            "process that uses the port, or choose another with --port"
        ) from error
    return listener
