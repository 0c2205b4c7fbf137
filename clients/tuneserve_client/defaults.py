"""The defaults of a new adapter and its steps, for this client and for ``tuneserve train``.

The wire keeps the defaults of the official SDK, so this client always sends its own.
"""

RANK = 16
LEARNING_RATE = 2e-4
