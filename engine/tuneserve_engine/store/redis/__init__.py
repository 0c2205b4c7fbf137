"""The store for several machines: Redis, with one Lua script per step."""
