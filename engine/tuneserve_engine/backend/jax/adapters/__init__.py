"""Adapters on the device, in the host's memory and on disk."""
