"""The upload and download of adapters as archives."""
