"""The form of the names of tenants, which operators choose."""

TENANT_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""1 to 64 characters; a path of the operator's API holds the name."""
