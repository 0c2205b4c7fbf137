"""Run ``tuneserve api`` with clients that may be silent for three seconds only:
``impatient_api.py``.

No setting allows so short a time.
"""

from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_server import serve
from tuneserve_server.cleanup import awake, sweeper
from tuneserve_server.settings import ApiSettings

TTL_S = 3.0


class Impatient(ApiSettings):
    @property
    def sweep_policy(self) -> SweepPolicy:
        return SweepPolicy(session_ttl_s=TTL_S, sample_ttl_s=TTL_S)


if __name__ == "__main__":
    sweeper._GRACE_S = 0.0
    awake._LEAST_S = 0.5
    raise SystemExit(serve.serve_api(Impatient()))
