"""The defaults of the client and of ``tuneserve train`` are the same two numbers."""

import inspect

from typer.testing import CliRunner

from tuneserve_client import Client, Model
from tuneserve_client.defaults import LEARNING_RATE, RANK
from tuneserve_server.cli.main import app
from tuneserve_server.cli.train_recipe import Recipe


def test_the_client_and_the_command_have_the_same_defaults() -> None:
    rank = inspect.signature(Client.create_model).parameters["rank"].default
    rate = inspect.signature(Model.optim_step).parameters["learning_rate"].default
    assert (rank, rate) == (16, 2e-4) == (RANK, LEARNING_RATE)
    assert Recipe("digest").learning_rate == rate
    text = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    assert f"Default: {rank}." in text and "Default: 2e-4." in text
