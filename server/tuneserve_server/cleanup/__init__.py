"""The background clean-up of the API process."""
