"""The usage of each tenant, and traces of its requests."""
