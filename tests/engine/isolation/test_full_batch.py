"""A tenant's bits alone and in a full batch, through the packing that the worker uses."""

from typing import Any

import numpy as np

from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.packing import PackingRequest, pack, unpack

VOCABULARY, ROUNDS, OTHERS = 61, 2, 31


def request(name: str, tenant: int, round_: int) -> PackingRequest:
    """One to four datums of any length. Tenants differ in rank, loss and data."""
    draw = np.random.default_rng([tenant, round_])
    policy = tenant % 3 == 1
    data = []
    for _ in range(1 + tenant % 4):
        length = int(draw.integers(2, 24))
        tokens, targets = draw.integers(0, VOCABULARY, (2, length)).astype(np.int32)
        weights = draw.normal(1, 0.5, (length, 1)).astype(np.float32)
        columns = {
            "advantages": draw.normal(size=length).astype(np.float32),
            "logprobs": draw.normal(-3, 0.2, length).astype(np.float32),
        }
        per_token = columns if policy else {}
        data.append(DecodedDatum(tokens, targets[:, None], weights * (not policy), True, per_token))
    loss = "importance_sampling" if policy else "cross_entropy"
    return PackingRequest(name, rank(tenant), TrainingData(loss, {}, False, data))


def rank(tenant: int) -> int:
    return (2, 4, 6, 8)[tenant % 4]


def params_of(tenant: int) -> AdamwParams:
    return AdamwParams(learning_rate=0.01 * (1 + tenant % 3), weight_decay=0.1)


def train(backend: JaxBackend, tenants: list[int], label: str) -> dict[int, list[Any]]:
    """The results of each tenant while these train together, and its state at the end."""
    names = {tenant: f"{label}-{tenant}" for tenant in tenants}
    for tenant, name in names.items():
        backend.create_adapter(name, AdapterConfig(rank=rank(tenant), alpha=16, seed=tenant))
    got: dict[int, list[Any]] = {tenant: [] for tenant in tenants}
    for round_ in range(ROUNDS):
        requests = [request(names[tenant], tenant, round_) for tenant in tenants]
        (packed,) = pack(requests, backend.static_shapes)
        result = backend.forward_backward(packed.batch)
        assert all(result.finite)
        metrics = backend.optim_steps([(names[tenant], params_of(tenant)) for tenant in tenants])
        for index, tenant in enumerate(tenants):
            logprobs, loss = unpack(packed, result.outputs, index, requests[index].data)
            got[tenant] += [[each.tobytes() for each in logprobs], loss, metrics[index]]
    for tenant, name in names.items():
        state = backend.adapter_state(name, optimizer=True)
        for group in (state.weights, state.first_moment, state.second_moment):
            got[tenant].append({key: tensor.tobytes() for key, tensor in group.items()})
        backend.delete_adapter(name)
    return got


def test_a_tenant_gets_the_same_bits_alone_and_beside_31_others(backend: JaxBackend) -> None:
    everybody = list(range(OTHERS + 1))
    together = train(backend, everybody, "together")
    assert train(backend, everybody[::-1], "reversed") == together
    for tenant in (0, 5, 14, 31):
        assert train(backend, [tenant], "alone")[tenant] == together[tenant]
