"""Access control: keys, scopes, hosts, budgets, limits."""
