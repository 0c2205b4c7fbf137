"""Run the cookbook's recipe ``twenty_questions`` with our model as both players.

No option of the recipe names the second player. The evaluation is left out: it plays 34 words 32
times each, for up to 20 turns.
"""

import asyncio
import sys

import chz
from tinker_cookbook.recipes.multiplayer_rl.twenty_questions import train
from tinker_cookbook.rl import train as rl


def main(model: str, log: str) -> None:
    options = train.CLIConfig(
        model_name=model,
        renderer_name="qwen3",
        group_size=2,
        batch_size=1,
        max_tokens=8,
        eval_every=0,
        max_steps=1,
        log_path=log,
    )
    config = train.build_config(options)
    builder = chz.replace(config.dataset_builder, answerer_base_model=model)
    asyncio.run(rl.main(chz.replace(config, dataset_builder=builder)))
    print("{}")


main(*sys.argv[1:])
