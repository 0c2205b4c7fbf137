"""Costs and results of requests: counted once with an outcome, summed, and stored as curves."""

from dataclasses import replace

import pytest

from tests.engine.store.contract.bench import (
    START_S,
    Bench,
    Contract,
    checkpoint,
    create,
    job,
    model,
    sample,
    scenario,
    session,
)
from tuneserve_engine.core.jobs import JobKind, Outcome, Rejection
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.usage import CurvePoint, Totals, Usage
from tuneserve_engine.store.base import KeptRequest, RequestState
from tuneserve_engine.store.errors import Fenced

DAY_S = 86_400.0
TRAINED = Usage(0.5, trained_tokens=100, padded_tokens=28, flops=4e5, queued_s=2, ran_s=1, others=3)
SAMPLED = Usage(0.25, prompt_tokens=7, sampled_tokens=20, flops=5.4e4)


def gradient(position: int, loss: float = 1.0) -> CurvePoint:
    return CurvePoint("forward_backward", position, loss_sum=loss, tokens=10, weight=8.0)


def step(position: int) -> CurvePoint:
    return CurvePoint(
        "optim_step", position, step=position, learning_rate=1e-4, grad_norm=0.1 + position
    )


class UsageContract(Contract):
    # --- sums -------------------------------------------------------------------------------

    @scenario
    async def test_usage_is_summed_by_tenant_and_model(self, bench: Bench) -> None:
        await bench.submit(1, 2)
        await bench.submit(1, model_id="s:train:1", tenant="bob")
        bob = bench.ids[1]
        await bench.submit(1)
        sampled = (await bench.store.submit(sample(1))).request_id
        await bench.finish(
            Outcome(bench.ids[1], usage=TRAINED),
            Outcome(bench.ids[2], usage=TRAINED),
            Outcome(sampled, usage=SAMPLED),
        )
        await bench.finish(Outcome(bob, usage=TRAINED))
        of_alice, of_bob = await bench.store.usage()
        assert (of_alice.tenant, of_bob.tenant) == ("alice", "bob")
        assert of_alice.by_model == {
            "s:train:0": Totals(2, 1.0, trained_tokens=200, padded_tokens=56, flops=8e5),
            "tiny": Totals(1, 0.25, prompt_tokens=7, sampled_tokens=20, flops=5.4e4),
        }
        assert of_alice.total == Totals(3, 1.25, 200, 7, 20, 56, 8e5 + 5.4e4)
        assert await bench.store.usage("alice") == [of_alice]
        assert await bench.store.usage("nobody") == []

    @scenario
    async def test_an_outcome_reported_twice_counts_once(self, bench: Bench) -> None:
        await bench.submit(1)
        outcome = Outcome(bench.ids[1], usage=TRAINED, point=gradient(0), changed=True)
        await bench.finish(outcome, outcome)
        await bench.finish(outcome)
        (used,) = await bench.store.usage("alice")
        assert used.total.requests == 1
        assert len(await bench.store.curve("s:train:0")) == 1

    @scenario
    async def test_an_outcome_reported_again_after_its_retention_counts_once(
        self, bench: Bench
    ) -> None:
        sampled = (await bench.store.submit(sample(1))).request_id
        outcome = Outcome(sampled, usage=SAMPLED)
        await bench.finish(outcome)
        bench.clock.now_s += 601
        await bench.lease()
        await bench.store.sweep(bench.clock.now_s, SweepPolicy(result_ttl_s=600))
        await bench.finish(outcome)
        (used,) = await bench.store.usage("alice")
        assert used.total.requests == 1

    @scenario
    async def test_a_cancelled_sample_is_charged_for_its_usage(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        ids = [(await bench.store.submit(sample(seq))).request_id for seq in (1, 2, 3)]
        for each in ids:
            await bench.store.cancel(each)
        assert await bench.store.usage() == []
        cost = Outcome(ids[0], rejection=Rejection("gone"), usage=SAMPLED)
        await bench.finish(cost)
        await bench.finish(cost, Outcome(ids[1], b"it ended all the same", usage=SAMPLED))
        (used,) = await bench.store.usage()
        assert used.by_model == {"tiny": Totals.from_usage(SAMPLED) + Totals.from_usage(SAMPLED)}
        assert (await bench.rejection(ids[1])).message.startswith("this sample was cancelled")
        bench.clock.now_s += 601  # even if the reason of its end is forgotten
        await bench.lease()
        await bench.store.sweep(bench.clock.now_s, SweepPolicy(result_ttl_s=600))
        late = Outcome(ids[2], usage=SAMPLED)
        await bench.finish(late, late)
        (used,) = await bench.store.usage()
        assert (used.total.requests, list(used.by_model)) == (3, ["tiny"])

    @scenario
    async def test_a_request_that_failed_on_the_device_is_charged_too(self, bench: Bench) -> None:
        await bench.submit(1)
        await bench.finish(Outcome(bench.ids[1], rejection=Rejection("not finite"), usage=TRAINED))
        (used,) = await bench.store.usage()
        assert used.total.device_s == 0.5

    @scenario
    async def test_a_save_whose_name_was_taken_is_charged_too(self, bench: Bench) -> None:
        await bench.store.put_record(checkpoint())
        await bench.submit(1, kind=JobKind.SAVE_WEIGHTS)
        await bench.finish(Outcome(bench.ids[1], checkpoint=checkpoint(), usage=TRAINED))
        assert "exists" in (await bench.rejection(bench.ids[1])).message
        (used,) = await bench.store.usage()
        assert used.total.requests == 1

    @scenario
    async def test_a_request_that_did_not_run_costs_nothing(self, bench: Bench) -> None:
        await bench.submit(1)
        await bench.finish(Outcome(bench.ids[1], rejection=Rejection("no room for it")))
        await bench.store.submit(replace(job(2), rejection=Rejection("a bad request")))
        assert await bench.store.usage() == []

    @scenario
    async def test_nothing_is_charged_for_a_worker_with_an_expired_lease(
        self, bench: Bench
    ) -> None:
        await bench.submit(1)
        before = bench.epoch
        await bench.lease("another process")
        with pytest.raises(Fenced):
            await bench.finish(Outcome(bench.ids[1], usage=TRAINED), epoch=before)
        assert await bench.store.usage() == []

    @scenario
    async def test_usage_can_be_summed_over_the_days_since_a_time(self, bench: Bench) -> None:
        midnight_s = (START_S // DAY_S + 1) * DAY_S
        for seq, at_s in enumerate((midnight_s - 1, midnight_s + 1), 1):
            bench.clock.now_s = at_s
            await bench.lease()
            await bench.submit(seq)
            await bench.finish(Outcome(bench.ids[seq], usage=TRAINED))
        requests = []
        for since_s in (0.0, midnight_s - 1, midnight_s, midnight_s + 3600):
            (used,) = await bench.store.usage("alice", since_s)
            requests.append(used.total.requests)
        assert requests == [2, 2, 1, 1]
        assert await bench.store.usage("alice", midnight_s + DAY_S) == []
        requests = []
        for before_s in (midnight_s, midnight_s + 1, midnight_s + DAY_S):
            (used,) = await bench.store.usage("alice", before_s=before_s)
            requests.append(used.total.requests)
        assert requests == [1, 2, 2]
        assert await bench.store.usage("alice", midnight_s, midnight_s) == []

    @scenario
    async def test_names_with_spaces_and_colons_are_kept_apart(self, bench: Bench) -> None:
        strange = [("a b", "c"), ("a", "b c"), ("a: b", "x y: z")]
        for tenant, name in strange:
            submitted = await bench.store.submit(
                sample(1, tenant=tenant, scope=f"s {tenant}{name}", base_model="tiny")
            )
            await bench.finish(Outcome(submitted.request_id, usage=SAMPLED))
        assert {each.tenant for each in await bench.store.usage()} == {t for t, _ in strange}

    # --- one request --------------------------------------------------------------------------

    @scenario
    async def test_a_result_includes_its_cost_and_duration(self, bench: Bench) -> None:
        await bench.submit(1)
        bench.clock.now_s += 4
        await bench.finish(Outcome(bench.ids[1], b"result", usage=TRAINED))
        bench.clock.now_s += 10
        for _ in range(2):  # any number of times
            outcome = await bench.ended(bench.ids[1])
            assert outcome is not None
            assert outcome.usage == replace(TRAINED, total_s=4.0)

    @scenario
    async def test_a_request_reports_its_state(self, bench: Bench) -> None:
        await bench.submit(1, 3)
        state = RequestState("alice", JobKind.OPTIM_STEP, "s:train:0", "ready")
        assert await bench.store.request(bench.ids[1]) == state
        assert await bench.store.request(bench.ids[3]) == replace(state, state="held")
        bench.clock.now_s += 2
        await bench.finish(Outcome(bench.ids[1], b"x", usage=TRAINED))
        done = replace(state, state="done", usage=replace(TRAINED, total_s=2.0))
        assert await bench.store.request(bench.ids[1]) == done
        await bench.submit(2)
        await bench.finish(Outcome(bench.ids[2], rejection=Rejection("no")))
        assert await bench.store.request(bench.ids[2]) == replace(state, state="done", failed=True)
        bench.clock.now_s += 601
        await bench.store.sweep(bench.clock.now_s, SweepPolicy(result_ttl_s=600))
        assert await bench.store.request(bench.ids[1]) == replace(state, state="expired")
        assert await bench.store.request("req_unknown") is None

    @scenario
    async def test_the_kept_requests_of_a_scope_are_listed_with_their_times(
        self, bench: Bench
    ) -> None:
        await bench.submit(1, 2, 3, 4, 10, 6)  # 6 and 10 wait for those before them
        bench.clock.now_s += 2
        await bench.finish(
            Outcome(bench.ids[1], b"x", usage=TRAINED),
            Outcome(bench.ids[2], rejection=Rejection("no")),
        )
        listed = await bench.store.kept_requests("alice", "s:train:0", limit=10)
        step, began_s = JobKind.OPTIM_STEP, START_S
        assert listed == [
            KeptRequest(
                *(bench.ids[1], step, 1, "done", began_s, began_s + 2),
                usage=replace(TRAINED, total_s=2.0),
            ),
            KeptRequest(bench.ids[2], step, 2, "done", began_s, began_s + 2, failed=True),
            *(KeptRequest(bench.ids[seq], step, seq, "ready", began_s) for seq in (3, 4)),
            *(KeptRequest(bench.ids[seq], step, seq, "held", began_s) for seq in (6, 10)),
        ]
        await bench.store.submit(replace(job(5), rejection=Rejection("a bad request")))
        rejected = (await bench.store.kept_requests("alice", "s:train:0", limit=3))[0]
        ended_s = began_s + 2
        assert (rejected.seq, rejected.created_s, rejected.finished_s) == (5, ended_s, ended_s)
        assert rejected.failed
        listed = await bench.store.kept_requests("alice", "s:train:0", limit=10)
        for limit in (1, 2, 5):  # the highest numbers, as numbers and not as texts
            found = await bench.store.kept_requests("alice", "s:train:0", limit=limit)
            assert found == listed[-limit:]
        assert await bench.store.kept_requests("bob", "s:train:0", limit=10) == []
        assert await bench.store.kept_requests("alice", "s:train", limit=10) == []
        bench.clock.now_s += 601
        await bench.lease()
        await bench.store.sweep(bench.clock.now_s, SweepPolicy(result_ttl_s=600, gap_ttl_s=1e9))
        kept = await bench.store.kept_requests("alice", "s:train:0", limit=10)
        assert [each.seq for each in kept] == [3, 4, 6, 10]

    # --- curves -------------------------------------------------------------------------------

    @scenario
    async def test_a_models_curve_has_its_losses_and_steps_in_order(self, bench: Bench) -> None:
        await bench.submit(1, 2, 3)
        points = [gradient(0, 2.5), gradient(1, float(2**60)), step(2)]
        for seq in (2, 1, 3):
            bench.clock.now_s = START_S + seq
            told = Outcome(bench.ids[seq], usage=TRAINED, point=points[seq - 1])
            await bench.finish(told)
        timed = [replace(each, time_s=START_S + i) for i, each in enumerate(points, 1)]
        assert await bench.store.curve("s:train:0") == timed
        assert await bench.store.curve("s:train:0", after=1) == timed[2:]
        assert await bench.store.curve("s:train:1") == []

    @scenario
    async def test_a_failed_request_is_not_in_the_curve(self, bench: Bench) -> None:
        await bench.submit(1)
        rejection = Rejection("too large a result")
        await bench.finish(Outcome(bench.ids[1], rejection=rejection, point=gradient(0)))
        assert await bench.store.curve("s:train:0") == []

    @scenario
    async def test_a_long_curve_is_thinned_evenly(self, bench: Bench) -> None:
        """A curve has up to 2,048 points per kind: all of the first 2,048, then every second, then
        every fourth. The newest is always there. A step is another kind.
        """
        count = 2 * 2048 + 9
        for start in range(1, count + 1, 200):
            seqs = range(start, min(start + 200, count + 1))
            await bench.submit(*seqs)
            done = [Outcome(bench.ids[seq], point=gradient(seq - 1)) for seq in seqs]
            await bench.finish(*done)
            kept = [each.position for each in await bench.store.curve("s:train:0")]
            stride = 1 if seqs[-1] <= 2048 else 2 if seqs[-1] <= 4096 else 4
            assert kept == sorted({*range(0, seqs[-1], stride), seqs[-1] - 1})
        await bench.submit(count + 1)
        await bench.finish(Outcome(bench.ids[count + 1], point=step(count)))
        assert (await bench.store.curve("s:train:0"))[-1].kind == "optim_step"

    # --- metrics ------------------------------------------------------------------------------

    @scenario
    async def test_the_store_reports_its_fill_level(self, bench: Bench) -> None:
        await bench.store.put_record(model())
        await bench.store.submit(create())
        await bench.submit(2, 3, 4)
        await bench.store.submit(sample(1, tenant="bob"))
        metrics = await bench.store.stats()
        assert metrics.unfinished == {"alice": 4, "bob": 1}
        assert (metrics.logged, metrics.points) == (0, 0)
        assert metrics.busy == {"s:train:0"}

    @scenario
    async def test_a_model_is_busy_until_its_last_request_has_ended(self, bench: Bench) -> None:
        await bench.submit(1, 2)
        await bench.submit(1, model_id="s:train:1")
        other = bench.ids[1]
        await bench.submit(1)
        await bench.finish(Outcome(bench.ids[1], usage=TRAINED), Outcome(other, usage=TRAINED))
        assert (await bench.store.stats()).busy == {"s:train:0"}
        await bench.finish(Outcome(bench.ids[2], usage=TRAINED))
        assert (await bench.store.stats()).busy == set()
