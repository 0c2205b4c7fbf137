"""Three tasks learnt one after another by four adapters at once, and what each of them forgets.

``.venv/bin/python examples/continual --out results``; ``docs/guides/osft.md`` has what came out.
"""

import argparse
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from contenders import CONTENDERS, QUICK, Contender
from lessons import TASKS, exams, lessons
from report import Losses, table, write

from tuneserve_client import Client, Datum, Model, gather
from tuneserve_server.cli.local_server import LocalServer

BATCH, STEPS, EXAM = 16, 24, 32
QUICK_STEPS, QUICK_EXAM = 6, 4  # too little to compare anything


def marks(model: Model, papers: dict[str, list[Datum]]) -> Losses:
    """The loss per token on each."""
    outputs = gather([model.forward(data) for data in papers.values()], shown=False)
    weights = [sum(datum.inputs["weights"].sum() for datum in data) for data in papers.values()]
    return {
        name: float(output.loss / weight)
        for name, output, weight in zip(papers, outputs, weights, strict=True)
    }


def learn(url: str, contender: Contender, how: argparse.Namespace) -> list[Losses]:
    """One tenant, start to finish: its marks at first, and after each task."""
    steps, size = (QUICK_STEPS, QUICK_EXAM) if how.quick else (STEPS, EXAM)
    with Client(url, f"tml-{contender.key}", name="continual") as client:
        tokenizer, rng = client.tokenizer(), random.Random(how.seed)
        papers = exams(tokenizer, size)
        model = client.create_model(adapter=contender.adapter, train_unembed=False, seed=how.seed)
        found = [marks(model, papers)]
        for task in TASKS:
            data = lessons(task, tokenizer)
            for step in range(steps):
                model.forward_backward(rng.sample(data, BATCH))
                model.optim_step(how.rates * contender.learning_rate * (1 - step / steps))
            found.append(marks(model, papers))  # behind all of it
            print(f"{contender.name}: {task} {found[-2][task]:.2f} → {found[-1][task]:.2f}")
        return found


def main() -> None:
    """Prints the table; writes it, the numbers and a chart of them into the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a folder for results.json, .md and .svg")
    parser.add_argument("--url", help="of a service that runs; without it, one is started")
    parser.add_argument(
        "--quick", action="store_true", help="less of everything, and smaller adapters"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the adapters and of the batches")
    parser.add_argument("--rates", type=float, default=1.0, help="times the learning rates")
    args = parser.parse_args()
    with ExitStack() as stack:
        url = args.url
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tuneserve-"))
            url = stack.enter_context(LocalServer(Path(folder), compile_ahead="false")).url
        pool = stack.enter_context(ThreadPoolExecutor())
        contenders = QUICK if args.quick else CONTENDERS
        found = pool.map(lambda each: learn(url, each, args), contenders)
        results = dict(zip([each.name for each in contenders], found, strict=True))
    print(table(results))
    if args.out:
        write(args.out, results)


if __name__ == "__main__":
    main()
