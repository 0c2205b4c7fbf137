"""The routes, one module per noun of the API."""
