"""The shortcuts of results."""

import numpy as np

from tuneserve_client.results import Sample, SampleOutput, TrainOutput


def test_the_loss_of_a_training_result_is_the_sum_over_all_tokens() -> None:
    assert TrainOutput([], {"loss:sum": 2.5, "loss:mean": 0.5}).loss == 2.5


def test_the_text_and_tokens_of_a_result_are_those_of_its_first_sample() -> None:
    logprobs = np.zeros(2, np.float32)
    first = Sample([5, 6], logprobs, "stop", text="ab")
    output = SampleOutput([first, Sample([7, 8], logprobs, "length", text="cd")])
    assert (output.text, output.tokens) == ("ab", [5, 6])
