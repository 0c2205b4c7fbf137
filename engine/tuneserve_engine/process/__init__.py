"""A process on its machine: its lock, its sockets, its permissions, its pauses."""
