"""Run the ``tuneserve`` command with a clean-up that starts half a second after the start instead
of two minutes, for tests that wait for it.
"""

from tuneserve_server.__main__ import main
from tuneserve_server.cleanup import sweeper

if __name__ == "__main__":
    sweeper._GRACE_S = 0.5
    main()
