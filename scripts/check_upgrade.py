"""Check that this checkout continues where another one stopped, with the same bits.

    git worktree add ../before COMMIT && make -C ../before setup
    python -m scripts.check_upgrade ../before [--store redis://127.0.0.1:6379/0]

A Redis must be empty, and keeps the data of the check.

The other checkout's service trains a model of each adapter kind, saves each, trains on and stops.
This checkout's service starts on the same data. The same client then trains the same models to the
end, and models that it loads from the checkpoints. Their losses, metrics and final weights
must be those of models that this checkout trains alone. The exit status is 1 if a bit differs.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file

from tuneserve_client import Adapter, Client, Datum, Model, next_token_datum
from tuneserve_server.cli.local_server import LocalServer

ROOT = Path(__file__).parent.parent
KEY = "tml-upgrade"
SAVED_AT, STOPPED_AT, STEPS = 2, 4, 8
ADAPTERS = {
    "lora": {"rank": 8},
    "rslora": {"rank": 4, "train_unembed": False},
    "osft": {"rank": 8, "train_unembed": False},
}

Curve = list[tuple[float, dict[str, float]]]
"""The loss and the metrics of each step, its gradient norm among them."""


class Checkout(LocalServer):
    """A service on one data directory and port, run by a checkout's own virtual environment."""

    def run_by(self, checkout: Path) -> None:
        """Make the next start use the checkout."""
        self.program = checkout.resolve() / ".venv/bin/tuneserve"


def batch(step: int) -> list[Datum]:
    """Return the data of a step, which only its number chooses."""
    random = np.random.default_rng(step)
    lengths = random.integers(2, 60, 6)
    return [next_token_datum(random.integers(2, 250, length).tolist()) for length in lengths]


def train(model: Model, steps: range) -> Curve:
    sent = [
        (model.forward_backward(batch(step)), model.optim_step(5e-3, weight_decay=0.1))
        for step in steps
    ]
    return [(gradient.result().loss, step.result().metrics) for gradient, step in sent]


def weights(client: Client, model: Model, folder: Path) -> dict[str, np.ndarray]:
    """Return the weights in PEFT's layout."""
    path = model.export(f"end-{folder.name}").result()
    return load_file(client.download(path, folder) / "adapter_model.safetensors")


class Run(NamedTuple):
    """A finished run: a curve and the final weights."""

    curve: Curve
    weights: dict[str, np.ndarray]


def is_same(what: str, found: Run, wanted: Run) -> bool:
    """Print whether two runs have the same bits, or where they differ, and return it."""
    assert found.weights.keys() == wanted.weights.keys() and len(found.curve) == len(wanted.curve)
    steps = [number for number in range(STEPS) if found.curve[number] != wanted.curve[number]]
    names = [
        name
        for name, array in wanted.weights.items()
        if not np.array_equal(found.weights[name], array)
    ]
    print(f"{what}: {f'steps {steps} and {names} differ' if steps or names else 'the same bits'}")
    return not steps and not names


def check(before: Path, folder: Path, settings: dict[str, str]) -> bool:
    """Train half by the other checkout and half by this one; return whether all bits are equal."""
    server = Checkout(folder, compile_ahead="false", **settings)
    server.run_by(before)
    with ExitStack() as stack:
        stack.enter_context(server)
        client = stack.enter_context(Client(server.url, KEY))
        models, saved, curves = {}, {}, {}
        for kind, options in ADAPTERS.items():
            models[kind] = client.create_model(adapter=Adapter(kind=kind), seed=3, **options)
            curves[kind] = train(models[kind], range(SAVED_AT))
            saved[kind] = models[kind].save("saved").result()
            curves[kind] += train(models[kind], range(SAVED_AT, STOPPED_AT))
        server.stop()
        server.run_by(ROOT)
        server.start()
        checks = []
        for kind, options in ADAPTERS.items():
            straight = client.create_model(adapter=Adapter(kind=kind), seed=3, **options)
            wanted = Run(
                train(straight, range(STEPS)), weights(client, straight, folder / f"{kind}-a")
            )
            curves[kind] += train(models[kind], range(STOPPED_AT, STEPS))
            halves = Run(curves[kind], weights(client, models[kind], folder / f"{kind}-b"))
            checks.append(is_same(f"{kind}, continued", halves, wanted))
            loaded = client.load_model(saved[kind])
            curve = curves[kind][:SAVED_AT] + train(loaded, range(SAVED_AT, STEPS))
            resumed = Run(curve, weights(client, loaded, folder / f"{kind}-c"))
            checks.append(is_same(f"{kind}, from its checkpoint", resumed, wanted))
    return all(checks)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_upgrade", description=__doc__)
    parser.add_argument("before", type=Path, help="the folder of the other checkout")
    parser.add_argument("--store", help="a Redis address; default: SQLite in the data directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args(arguments)
    for checkout in (options.before, ROOT):
        if not (checkout / ".venv/bin/tuneserve").exists():
            raise SystemExit(f"there is no {checkout}/.venv; run make setup in {checkout}")
    settings = {"dtype": options.dtype, **({"store": options.store} if options.store else {})}
    with tempfile.TemporaryDirectory() as folder:
        return 0 if check(options.before, Path(folder), settings) else 1


if __name__ == "__main__":
    sys.exit(main())
