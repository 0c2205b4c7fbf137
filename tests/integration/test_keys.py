"""Keys with the real processes, the command line and the official SDK."""

import subprocess
import sys
import time

import pytest
import tinker
from tinker import types

from tests.quick_service import QUICK
from tests.sdk import service_client
from tuneserve_server.cli.local_server import LocalServer

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def tuneserve(server, *arguments):
    """The output of the command."""
    whole = [sys.executable, "-m", "tuneserve_server", *arguments, "--data-dir", server.data_dir]
    return subprocess.run(whole, capture_output=True, text=True, check=True).stdout.strip()


def is_refused(server, key):
    """Whether the SDK reports that the key is invalid."""
    try:
        tinker.RestClient(base_url=server.url, api_key=key).list_training_runs().result()
    except tinker.AuthenticationError as error:
        assert "tuneserve keys create" in str(error)
        return True
    return False


def test_the_sdk_trains_with_a_valid_key_and_is_refused_with_any_other(tmp_path):
    with LocalServer(tmp_path, **QUICK) as server:
        assert not is_refused(server, "tml-anybody")
        key = tuneserve(server, "keys", "create", "--tenant", "alice")
        made_s = time.monotonic()
        while not is_refused(server, "tml-anybody"):
            assert time.monotonic() < made_s + 5
        assert is_refused(server, f"{key[:-1]}{'0' if key[-1] != '0' else '1'}")
        rest = tinker.RestClient(base_url=server.url, api_key=key)
        with service_client(server.url, key) as client:
            trainer = client.create_lora_training_client(server.base_model, rank=4).result()
            datum = types.Datum(
                model_input=types.ModelInput.from_ints([5, 6, 7]),
                loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
            )
            gradient = trainer.forward_backward([datum], "cross_entropy")
            step = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
            assert len(gradient.result().loss_fn_outputs) == 1
            step.result()
            runs = rest.list_training_runs().result().training_runs
            assert [run.model_owner for run in runs] == ["alice"]
        tuneserve(server, "keys", "revoke", key.split("-")[1])
        revoked_s = time.monotonic()
        with pytest.raises(tinker.AuthenticationError):
            while time.monotonic() < revoked_s + 5:
                rest.list_training_runs().result()
        assert is_refused(server, key)
