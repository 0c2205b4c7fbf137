"""The backend on JAX and Flax."""
