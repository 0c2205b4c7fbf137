"""Check the engine on the GPU of this machine, and measure it; prints one JSON line per row.

    PYTHONPATH=. python benchmarks/gpu_accept.py              # on a machine with a GPU
    PYTHONPATH=. python benchmarks/gpu_accept.py --dry-run    # tiny models, on any device

- ``environment``: the device and its software, and the rates that it reaches.
- ``answers``, ``errors``: logprobs and gradients in bfloat16 and float32, and both on the CPU. The
  latter can run on another machine, with the former's ``--folder``.
- ``bits``: the logprobs of a LoRA and an rsLoRA from training, ``forward`` and rescoring, and a
  step's gradient, weights and moments again and behind another request, under every ``remat``;
  samples alone and in company; logprobs of OSFT. ``differ`` names the ways whose bits differ.
- ``restart``: the digests of all of these in two more processes.
- ``train``: a micro-batch of 8,192 tokens, of one tenant and of eight, beside the prediction of the
  same compiled program (``scripts/gpu_compile``), and its temporary memory beside the plan.
- ``decode``: sequences that are decoded together, likewise.
- ``small``: small requests, by turns with programs that may keep excess precision.

The weights are random: nothing is downloaded. With ``--top 20``, ``train`` and ``decode`` list the
kernels that took the most time.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax
from gpu_numbers import answer, bits, errors, reference, restart
from gpu_scales import CARD, DRY
from gpu_speed import decode, environment, small, train

from tuneserve_engine.core.backend_options import DType

PHASES = {
    "environment": environment,
    "answers": answer,
    "bits": bits,
    "restart": restart,
    "train": train,
    "decode": decode,
    "small": small,
    "errors": errors,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny models, on any device")
    parser.add_argument("--only", action="append", choices=PHASES, help="a phase to run")
    parser.add_argument("--models", nargs="+", help="the models of train and decode")
    parser.add_argument("--slots", nargs="+", type=int, help="decode slots, if not 8 and 64")
    parser.add_argument("--top", type=int, default=0, help="list the slowest kernels")
    parser.add_argument("--folder", type=Path, help="keep the run's files here")
    parser.add_argument("--reference", choices=get_args(DType), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    scale = replace(DRY if arguments.dry_run else CARD, top=arguments.top)
    if arguments.reference:
        reference(scale, arguments.folder, arguments.reference)
        return
    phases = arguments.only or PHASES
    if jax.default_backend() == "cpu" and not arguments.dry_run and phases != ["errors"]:
        raise SystemExit("JAX sees no GPU; use --dry-run to try the script on a CPU")
    if phases == ["errors"] and arguments.folder is None:
        parser.error("--only errors needs the --folder with the answers of a device")
    if unknown := set(arguments.models or ()) - set(scale.models):
        parser.error(f"unknown models {sorted(unknown)}; choose from {list(scale.models)}")
    if arguments.models:
        scale = replace(scale, models={name: scale.models[name] for name in arguments.models})
    if arguments.slots:
        scale = replace(scale, decode_slots=tuple(arguments.slots))
    with ExitStack() as stack:
        folder = arguments.folder
        if folder is None:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="tuneserve-bench-"))
            folder = Path(name)
        for phase in phases:
            began_s = time.perf_counter()
            for row in PHASES[phase](scale, folder):
                print(json.dumps(row), flush=True)
            took_s = round(time.perf_counter() - began_s, 1)
            print(json.dumps({"phase": phase, "s": took_s}), flush=True)


if __name__ == "__main__":
    main()
