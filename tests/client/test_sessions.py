"""Sessions and the samplers that they share, against the real service."""

from tests.client.conftest import KEY
from tuneserve_client import Client, next_token_datum
from tuneserve_server.cli.local_server import LocalServer

DATA = [next_token_datum([5, 6, 7, 8]), next_token_datum([9, 8, 7])]


def test_clients_with_a_samplers_id_sample_the_same_unnamed_weights(
    server: LocalServer, client: Client
) -> None:
    model = client.create_model(rank=4, seed=7)
    model.forward_backward(DATA)
    model.optim_step(1e-2)
    own = model.save_sampler()
    assert own.path is None
    with Client(server.url, KEY) as other:
        shared = [other.sampler(own.id) for _ in range(2)]
        assert [each.base_model for each in shared] == [own.base_model] * 2
        first, second, third = (
            each.sample([5, 6], max_tokens=6, seed=seed)
            for each, seed in [(own, 7), (shared[0], 7), (shared[1], 8)]
        )
        assert first.request_id != second.request_id != third.request_id
        assert second.result().samples[0].tokens == first.result().samples[0].tokens
        assert third.result().samples[0].tokens != first.result().samples[0].tokens


def test_sessions_and_requests_are_described(client: Client) -> None:
    model = client.create_model(rank=4)
    gradient = model.forward_backward(DATA)
    gradient.result()
    (told,) = client.request(gradient.request_id)
    assert (told.kind, told.status) == ("forward_backward", "done")
    assert told.cost is not None and told.cost.trained_tokens == sum(
        len(each.tokens) for each in DATA
    )
    session = model.id.partition(":")[0]
    assert session in client.sessions()
    assert client.session(session).training_run_ids == [model.id]
    sampler = client.sampler()
    assert client.sampler_info(sampler.id).base_model == sampler.base_model
