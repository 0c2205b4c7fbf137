"""Teaches an adapter to answer each word problem with one of two numbers, at random.

A model that never answers earns no reward, and then `rl_loop` trains nothing. The script writes the
`checkpoints.jsonl` from which `rl_loop` resumes, and prints the checkpoint's path.
"""

import json
import sys
from typing import Any

import datasets
import tinker
from tinker_cookbook import checkpoint_utils, renderers
from tinker_cookbook.recipes.math_rl.math_env import MathEnv
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer

# As in rl_loop and in the math environment.
SUFFIXES = (
    " Provide a numerical answer without units, written inside \\boxed{}.",
    MathEnv.question_suffix(),
)
ANSWERS = (3, 7)
COIN_TOSS = 0.6931  # nats: the loss that remains when one of two answers must be guessed
MOST_STEPS = 60


def main(base_model: str, log_path: str) -> None:
    renderer = renderers.get_renderer("qwen3", get_tokenizer(base_model))
    questions = datasets.load_dataset("openai/gsm8k", "main")["train"]["question"][:2]
    data = [
        conversation_to_datum(
            conversation(question, suffix, answer),
            renderer,
            max_length=None,
            train_on_what=renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE,
            reduction="none",
        )
        for question in questions
        for suffix in SUFFIXES
        for answer in ANSWERS
    ]
    trainer = (
        tinker.ServiceClient().create_lora_training_client(base_model, rank=8, seed=0).result()
    )
    adam = tinker.AdamParams(learning_rate=5e-3)
    for _ in range(MOST_STEPS):
        passed = trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(adam).result()
        loss = passed.result().metrics["loss:sum"] / len(data)
        print(f"loss per answer: {loss:.3f}", file=sys.stderr)
        if loss < COIN_TOSS + 0.3:
            break
    else:
        raise RuntimeError(f"loss per answer is still {loss:.3f} after {MOST_STEPS} steps")
    paths = checkpoint_utils.save_checkpoint(
        trainer, name="taught", log_path=log_path, kind="state", loop_state={"batch": 0}
    )
    print(json.dumps(paths))


def conversation(question: str, suffix: str, answer: int) -> list[Any]:
    """The few-shot example with which both recipes start, then the question and the answer."""
    example = MathEnv.standard_fewshot_prefix()
    asked = example[0]["content"].removesuffix(MathEnv.question_suffix()) + suffix
    return [
        {"role": "user", "content": asked},
        example[1],
        {"role": "user", "content": question + suffix},
        {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
