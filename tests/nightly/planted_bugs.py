"""The table of planted bugs: each a small edit of one file, and the tests that must notice it."""

from dataclasses import dataclass

CLIENT, ENGINE = "clients/tuneserve_client", "engine/tuneserve_engine"
SERVER = "server/tuneserve_server"
JAX, SQLITE = f"{ENGINE}/backend/jax", f"{ENGINE}/store/sqlite"
REDIS = f"{ENGINE}/store/redis/scripts"
JAX_TESTS, WORKER_TESTS = "tests/engine/backend/jax", "tests/engine/worker"
SIMULATION = ("tests/faults/test_simulation.py", "-m", "not nightly")
LONGER = ("tests/faults/test_simulation.py", "-m", "nightly", "-k", "longer")
BUCKET_TESTS = ("tests/engine/store/test_object_files.py",)
JAX_KILLS = ("tests/faults/test_kills_jax.py", "-m", "not nightly")


@dataclass(frozen=True)
class Bug:
    """``was`` occurs once in ``file``, and ``becomes`` takes its place.

    ``tests`` are pytest's arguments.
    """

    name: str
    file: str
    was: str
    becomes: str
    tests: tuple[str, ...]


def on_memory(contract: str) -> tuple[str, ...]:
    """The tests of the store's contract with this name, on SQLite in memory."""
    return "tests/engine/store/test_base.py", "-k", f"TestMemoryStore and {contract}"


def on_redis(contract: str) -> tuple[str, ...]:
    """The tests of the store's contract with this name, on a Redis server."""
    chosen = f"TestRedisStore and not Processes and {contract}"
    return "tests/engine/store/redis/test_store.py", "-k", chosen


BUGS = (
    # --- recovery and the simulation --------------------------------------------------------------
    Bug(
        "a sampler that draws from hidden randomness",
        "tests/support/fake_samples.py",
        "first = 0 if request.temperature == 0 else request.seed + index",
        "first = __import__('random').randrange(60)",
        SIMULATION,
    ),
    Bug(
        "an adapter that starts from hidden randomness",
        f"{ENGINE}/adapters/checkpoint_format.py",
        "key=np.array([seed % 2**64, index], np.uint64)",
        "key=np.random.default_rng().integers(2**63, size=2, dtype=np.uint64)",
        JAX_KILLS,
    ),
    Bug(
        "the accumulator is missing from the point",
        f"{ENGINE}/worker/execution/executor.py",
        "optimizer=True, accumulator=True",
        "optimizer=True",
        SIMULATION,
    ),
    Bug(
        "the second moment is missing from the point",
        f"{ENGINE}/adapters/state.py",
        '"second_moment", "accumulator")',
        '"accumulator")',
        SIMULATION,
    ),
    Bug(
        "the step count is missing from the point",
        f"{ENGINE}/adapters/checkpoint.py",
        'int(metadata["step"])',
        "0",
        JAX_KILLS,
    ),
    Bug(
        "a point before the results that it has the effect of",
        f"{ENGINE}/worker/models/recovery_points.py",
        "        await self._services.unstored.wait(model_id, position)\n",
        "",
        SIMULATION,
    ),
    Bug(
        "a point that claims one request more than it has",
        f"{ENGINE}/worker/execution/executor.py",
        "model.position = job.position + 1",
        "model.position = job.position + 2",
        SIMULATION,
    ),
    Bug(
        "outcomes count as stored before they are",
        f"{ENGINE}/worker/unstored.py",
        "            await queue.finish(epoch, batch)\n",
        "            self._outcomes = self._outcomes[len(batch) :]\n"
        "            await queue.finish(epoch, batch)\n"
        "            batch = []\n",
        SIMULATION,
    ),
    Bug(
        "no check of the epoch",
        f"{ENGINE}/store/sqlite/placement.py",
        'if tx.execute("SELECT 1 FROM workers WHERE epoch = ?", epoch).fetchone() is None:',
        "if False:",
        ("tests/support/test_memory_store.py", "tests/faults/test_leases.py"),
    ),
    Bug(
        "a file is not synced before it is renamed",
        f"{ENGINE}/store/files.py",
        "        fs.fsync(descriptor)\n    ",
        "        pass\n    ",
        ("tests/faults/test_crash_states.py",),
    ),
    Bug(
        "the renamed directory's parent is not synced",
        f"{ENGINE}/store/files.py",
        "killed before this sync.\n        self._sync_directory(self._root)",
        "killed before this sync.",
        ("tests/faults/test_crash_states.py",),
    ),
    Bug(
        "a resend is a request of its own",
        f"{ENGINE}/store/sqlite/jobs.py",
        "    if known is not None:",
        "    if known is not None and job.kind != JobKind.FORWARD_BACKWARD:",
        SIMULATION,
    ),
    Bug(
        "takes go on while a model is released",
        f"{ENGINE}/worker/worker.py",
        "            async with self._taking:\n                await call()\n",
        "            if True:\n                self._pause.clear()\n                await call()\n",
        LONGER,
    ),
    Bug(
        "the fallback point's log is trimmed",
        f"{ENGINE}/store/sqlite/recovery_points.py",
        "_drop_payloads(tx, point.model_id, position)",
        "_drop_payloads(tx, point.model_id, point.position)",
        ("tests/engine/worker/models/test_recovery.py", "tests/support/test_memory_store.py"),
    ),
    Bug(
        "the last step is missing from the log",
        f"{ENGINE}/worker/execution/outcomes.py",
        'return replace(in_json(job, {"metrics": finite}), changed=True, point=point)',
        'return replace(in_json(job, {"metrics": finite}), point=point)',
        SIMULATION,
    ),
    Bug(
        "replay forgets in what halves a request ran",
        f"{ENGINE}/worker/pending.py",
        "halvings=entry.halvings",
        "halvings=0",
        ("tests/engine/worker/models/test_recovery.py",),
    ),
    Bug(
        "a gradient that failed stays in the accumulator",
        f"{ENGINE}/backend/jax/training/adapter_slots.py",
        "jnp.where(finite, new, old), total",
        "new, total",
        ("tests/engine/backend/jax/training/test_adapter_slots.py",),
    ),
    # --- losses, gradients and steps --------------------------------------------------------------
    Bug(
        "a ppo token that still learns beyond its clip",
        f"{JAX}/training/losses.py",
        "gradient = jnp.where(clipped < free, 0.0, -free)",
        "gradient = -free",
        (f"{JAX_TESTS}/training/test_losses.py", "-k", "equal_the_oracle"),
    ),
    Bug(
        "a gspo ratio that takes in the sequence before it",
        f"{JAX}/training/losses.py",
        "sums = sums + jnp.where(datum == before[0], before[1][:, None], 0.0)",
        "sums = sums + before[1][:, None]",
        (f"{JAX_TESTS}/training/test_losses.py", "-k", "elsewhere_and_beside"),
    ),
    Bug(
        "a weight decay that ignores the learning rate",
        f"{JAX}/training/adamw.py",
        "np.float32(1 - params.learning_rate * params.weight_decay)",
        "np.float32(1 - params.weight_decay)",
        (f"{JAX_TESTS}/training/test_adamw.py",),
    ),
    Bug(
        "moments that see the gradient before it is clipped",
        f"{JAX}/training/adamw.py",
        "gradient = jax.tree.map(lambda g: g * first * second, gradient)",
        "gradient = jax.tree.map(lambda g: g * first, gradient)",
        (f"{JAX_TESTS}/training/test_adamw.py",),
    ),
    Bug(
        "a step after which the gradient is still in the accumulator",
        f"{JAX}/training/adamw.py",
        "return SteppedAdapter(*new[:3], jax.tree.map(jnp.zeros_like, accumulator), new[3])",
        "return SteppedAdapter(*new[:3], accumulator, new[3])",
        (f"{JAX_TESTS}/training/test_adamw.py",),
    ),
    Bug(
        "an unembedding gradient that another request left in the slot",
        f"{JAX}/training/adapter_slots.py",
        "return jnp.where(trained, old + gradient[0], old)",
        "return old + gradient[0]",
        (f"{JAX_TESTS}/training/test_adapter_slots.py",),
    ),
    Bug(
        "a request that keeps only the gradient of its last micro-batch",
        f"{JAX}/training/running_batch.py",
        "earlier, self._begun = slots & self._begun, slots | self._begun",
        "earlier = slots & self._begun",
        (f"{JAX_TESTS}/training/test_trainer.py", "-k", "two_micro_batches"),
    ),
    Bug(
        "gradients of bins that are added from the last device to the first",
        f"{JAX}/training/gradient_sums.py",
        "zip(parts, holds, strict=True)",
        "zip(parts[::-1], holds[::-1], strict=True)",
        (f"{JAX_TESTS}/training/test_gradient_sums.py",),
    ),
    Bug(
        "an interrupted batch whose gradients the interrupting batch overwrites",
        f"{JAX}/training/slots.py",
        "first, aside = 0, self._set_aside()",
        "first, aside = 0, None",
        (f"{JAX_TESTS}/training/test_slots.py",),
    ),
    # --- adapters ---------------------------------------------------------------------------------
    Bug(
        "a gradient of A without the adapter's scale",
        f"{JAX}/model/lora.py",
        'float32_product("BTD,BTR->BDR", x.astype(jnp.float32), by_low)',
        'float32_product("BTD,BTR->BDR", x.astype(jnp.float32), by_scaled)',
        (f"{JAX_TESTS}/model/test_lora.py",),
    ),
    Bug(
        "a kernel that keeps an earlier batch's gradient",
        f"{JAX}/training/gradient_kernels.py",
        "jnp.where(runs.is_first[first], 0.0, old)",
        "old",
        (f"{JAX_TESTS}/training/test_gradient_kernels.py",),
    ),
    Bug(
        "a kernel that adds some requests twice and some never",
        f"{JAX}/training/gradient_kernels.py",
        "runs.begins[at + lane + index * lanes]",
        "runs.begins[at + index * lanes]",
        (f"{JAX_TESTS}/training/test_gradient_kernels.py",),
    ),
    Bug(
        "a kernel that multiplies with its neighbour's adapter",
        f"{JAX}/model/block_lora.py",
        "slot = place.slot[place.at[...] + block]\n    tokens = jnp.arange(out",
        "slot = place.slot[block]\n    tokens = jnp.arange(out",
        (f"{JAX_TESTS}/model/test_block_lora.py",),
    ),
    Bug(
        "an exported rsLoRA with the alpha of another scale",
        f"{ENGINE}/adapters/kinds/lora.py",
        'frozen="", alpha=scale * config.rank)',
        'frozen="", alpha=config.alpha)',
        (
            "tests/engine/adapters/kinds/test_kinds.py",
            "tests/engine/adapters/kinds/test_lora.py",
            "tests/engine/adapters/kinds/test_rslora.py",
        ),
    ),
    Bug(
        "an OSFT step that reaches the frozen directions",
        f"{JAX}/training/kind_programs.py",
        "return SteppedAdapter(_projected(kind, new, frozen), mean, square, empty, norm)",
        "return SteppedAdapter(new, mean, square, empty, norm)",
        (f"{JAX_TESTS}/training/test_kind_programs.py", "-k", "strong_directions"),
    ),
    Bug(
        "an eviction that loses the accumulated gradient",
        f"{JAX}/adapters/cache.py",
        "saved_state(adapter, optimizer=adapter.step > 0, accumulator=True)",
        "saved_state(adapter, optimizer=adapter.step > 0, accumulator=False)",
        (f"{JAX_TESTS}/adapters/test_cache.py", "-k", "any_order and 2.5-0-1"),
    ),
    Bug(
        "an adapter of the running batch that is evicted",
        f"{JAX}/adapters/cache.py",
        "                and adapter_id not in self._pinned\n",
        "",
        (f"{JAX_TESTS}/adapters/test_cache.py", "-k", "requested_adapters_stay or spares"),
    ),
    Bug(
        "a damaged file that is taken for one without checksums",
        f"{ENGINE}/adapters/tensor_file.py",
        "    if metadata.keys() <= _UNCHECKED:\n",
        "    if _SUMS not in metadata:\n",
        ("tests/engine/adapters/test_damage.py", "-k", "state or removed"),
    ),
    Bug(
        "a checkpoint of another revision that loads",
        f"{ENGINE}/adapters/checkpoint.py",
        "if trained_on and revision and trained_on != revision:",
        "if trained_on and not revision:",
        ("tests/engine/adapters/test_checkpoint.py", "-k", "another_revision"),
    ),
    Bug(
        "an import whose tensors share their bytes",
        f"{ENGINE}/adapters/peft_import.py",
        "        if start != expected or end < start:\n",
        "        if end < start:\n",
        ("tests/engine/adapters/test_peft_import.py", "-k", "one_by_one"),
    ),
    # --- packing and attention --------------------------------------------------------------------
    Bug(
        "a token that cannot see the earlier blocks of its datum",
        f"{ENGINE}/worker/execution/packing.py",
        "micro_batch.first_visible_block[:] = (starts - micro_batch.positions[::block]) // block",
        "micro_batch.first_visible_block[:] = starts // block",
        (f"{WORKER_TESTS}/execution/test_packing.py",),
    ),
    Bug(
        "a request that gets the logprobs of the first one in its pass",
        f"{ENGINE}/worker/execution/packing.py",
        "in zip(data.data, packed.locations[member], strict=True)",
        "in zip(data.data, packed.locations[0], strict=True)",
        (f"{WORKER_TESTS}/execution/test_packing.py", "-k", "own_outputs"),
    ),
    Bug(
        "blocks that run under the adapter of another tenant",
        f"{ENGINE}/worker/execution/packing.py",
        "micro_batch.block_request[at:after] = bin_.member",
        "micro_batch.block_request[at:after] = 0",
        (f"{WORKER_TESTS}/execution/test_packing.py",),
    ),
    Bug(
        "a gradient that flows between the datums of a block",
        f"{JAX}/attention/packed.py",
        "    return same & (seen.position[i][:, None] >= seen.position[j][None, :])",
        "    return seen.position[i][:, None] >= seen.position[j][None, :]",
        (f"{JAX_TESTS}/attention/test_packed.py", "-k", "dense_reference"),
    ),
    Bug(
        "a part of a divided datum that begins at position 0",
        f"{ENGINE}/worker/execution/packing.py",
        "micro_batch.positions[part] = np.arange(own.start, own.stop, dtype=np.int32)",
        "micro_batch.positions[part] = np.arange(own.stop - own.start, dtype=np.int32)",
        (f"{WORKER_TESTS}/execution/test_bins.py",),
    ),
    Bug(
        "the gradient of a key without the queries of other devices",
        f"{JAX}/attention/divided.py",
        "    for part in mine[1:]:\n",
        "    for part in mine[:0]:\n",
        (f"{JAX_TESTS}/attention/test_divided.py", "-k", "bits_of_one"),
    ),
    # --- sampling ---------------------------------------------------------------------------------
    Bug(
        "a cancelled sample whose snapshot keeps its room",
        f"{ENGINE}/worker/execution/read_ahead.py",
        "            self._read[file_id] -= request_ids\n",
        "            pass\n",
        (f"{WORKER_TESTS}/execution/test_read_ahead.py", "-k", "cancelled"),
    ),
    Bug(
        "a draw that repeats its random bits at every step",
        f"{JAX}/sampling/logits.py",
        "jnp.asarray(rows.seed), stream, jnp.asarray(rows.sample), step\n",
        "jnp.asarray(rows.seed), stream, jnp.asarray(rows.sample), jnp.zeros_like(step)\n",
        (f"{JAX_TESTS}/sampling/test_logits.py", "-k", "each_change or independent"),
    ),
    Bug(
        "a prompt page that is found whatever came before it",
        f"{JAX}/sampling/kv_pages.py",
        "before = blake2b(before + part).digest()",
        "before = blake2b(blake2b(scope.encode()).digest() + part).digest()",
        (f"{JAX_TESTS}/sampling/test_kv_pages.py",),
    ),
    Bug(
        "a prompt page that is freed while another sequence reads it",
        f"{JAX}/sampling/kv_pages.py",
        "            if part.users:\n                continue\n",
        "",
        (f"{JAX_TESTS}/sampling/test_kv_pages.py",),
    ),
    Bug(
        "a growing sequence whose new page takes the place of the one before",
        f"{JAX}/sampling/decode_batch.py",
        "sequence.context // size + len(sequence.private_pages)]",
        "sequence.context // size + len(sequence.private_pages) - 1]",
        (f"{JAX_TESTS}/sampling/test_decode_batch.py",),
    ),
    Bug(
        "a tenant that waits for pages until another's sequence ends",
        f"{JAX}/sampling/sampler.py",
        "can_preempt = key[1] not in decoding and self",
        "can_preempt = False and self",
        (f"{JAX_TESTS}/sampling/test_decode_batch.py",),
    ),
    Bug(
        "a tenant that waits behind a busy one's other rank bucket",
        f"{JAX}/sampling/sampler.py",
        "(key[1] in decoding, held[key])",
        "held[key]",
        (f"{JAX_TESTS}/sampling/test_decode_batch.py",),
    ),
    Bug(
        "samples of one tenant that may reuse the prompts of another",
        f"{ENGINE}/worker/execution/sampling.py",
        "return _Sampling(job, command, replace(request, owner=job.tenant), parameters)",
        "return _Sampling(job, command, request, parameters)",
        (f"{WORKER_TESTS}/execution/test_executor.py", "-k", "belongs_to_the_tenant"),
    ),
    Bug(
        "a stop string that is missed where the window moves on",
        f"{JAX}/sampling/stop_criteria.py",
        "            del self._window[: -self._keep]\n",
        "            self._window.clear()\n",
        (f"{JAX_TESTS}/sampling/test_stop_criteria.py",),
    ),
    Bug(
        "a rescored sample with the logprobs of its prompt",
        f"{ENGINE}/worker/execution/rescoring.py",
        "logprobs=logprobs[-len(drawn.tokens) :]",
        "logprobs=logprobs[: len(drawn.tokens)]",
        (f"{WORKER_TESTS}/execution/test_rescoring.py", "-k", "same_text"),
    ),
    # --- the worker -------------------------------------------------------------------------------
    Bug(
        "a weight that works the wrong way round",
        f"{ENGINE}/worker/scheduling/fair_share.py",
        "+ seconds * share / self._weights.get(tenant, 1.0)",
        "+ seconds * share * self._weights.get(tenant, 1.0)",
        (f"{WORKER_TESTS}/scheduling/test_fairness.py", "-k", "in_proportion_to_the_weights"),
    ),
    Bug(
        "a tenant that saves up device time while it is away",
        f"{ENGINE}/worker/scheduling/fair_share.py",
        "        for tenant in waiting:\n"
        "            self._counters[tenant] = max(self._counters.get(tenant, 0.0), "
        "self._floor)\n",
        "        for tenant in waiting:\n            self._counters.setdefault(tenant, 0.0)\n",
        (f"{WORKER_TESTS}/scheduling/test_fairness.py", "-k", "no_credit"),
    ),
    Bug(
        "a step that overtakes the gradient before it",
        f"{ENGINE}/worker/scheduling/runnable.py",
        "if model in blocked or (model in only_gradients and not gradient):",
        "if model in blocked:",
        (f"{WORKER_TESTS}/scheduling/test_runnable.py",),
    ),
    Bug(
        "a long request that every other tenant waits for",
        f"{ENGINE}/worker/scheduling/scheduler.py",
        "if not can_share(first) or self._estimates.is_long(first, self._slice_s):",
        "if not can_share(first):",
        (f"{WORKER_TESTS}/scheduling/test_scheduler.py", "-k", "several_slices"),
    ),
    Bug(
        "a replayed request that forgets the deaths that it may have caused",
        f"{ENGINE}/worker/pending.py",
        "attempts=max(entry.job.attempts, attempts),",
        "attempts=entry.job.attempts,",
        (f"{WORKER_TESTS}/test_pending.py",),
    ),
    Bug(
        "a restored model that skips a logged request",
        f"{ENGINE}/worker/models/recovery.py",
        "            return point.position\n",
        "            return point.position + 1\n",
        (f"{WORKER_TESTS}/models/test_recovery.py", "-k", "damaged_point"),
    ),
    Bug(
        "device seconds that are charged twice",
        f"{ENGINE}/worker/accounting/usage_ledger.py",
        "                device_s -= seconds\n",
        "",
        (f"{WORKER_TESTS}/accounting/test_usage_ledger.py", "-k", "ledger_times or all_seconds"),
    ),
    # --- the store --------------------------------------------------------------------------------
    Bug(
        "results of a worker that has lost the job",
        f"{SQLITE}/finish.py",
        "if is_unfinished and is_elsewhere:",
        "if False:",
        on_memory("results_of_a_job_placed_with_another_worker"),
    ),
    Bug(
        "a take that returns the jobs of every worker",
        f"{SQLITE}/jobs.py",
        "\"WHERE state = 'ready' AND worker = ? AND release > ?",
        "\"WHERE state = 'ready' AND IFNULL(worker, 0) >= 0 * ? AND release > ?",
        on_memory("two_workers_share_the_models"),
    ),
    Bug(
        "a limit of bytes that the last request may exceed",
        f"{SQLITE}/limits.py",
        "elif held_jobs and held_bytes + size > most_bytes:",
        "elif held_jobs and held_bytes > most_bytes:",
        on_memory("limit_of_bytes"),
    ),
    Bug(
        "usage that a repeated report counts twice",
        f"{SQLITE}/usage.py",
        "WHERE request_id = ? AND usage IS NULL AND NOT {UNFINISHED}",
        "WHERE request_id = ? AND NOT {UNFINISHED}",
        on_memory("reported_twice"),
    ),
    Bug(
        "a sweep that forgets requests that replay needs",
        f"{SQLITE}/schema.py",
        "FORGETTABLE = \"state = 'expired' AND digest IS NULL AND (",
        "FORGETTABLE = \"state = 'expired' AND (",
        on_memory("requests_that_replay_may_need"),
    ),
    Bug(
        "a recording that any tenant may read",
        f"{SQLITE}/recordings.py",
        '"SELECT n, size, gone FROM recordings WHERE tenant = ? AND scope = ? AND seq = ?",',
        "\"SELECT n, size, gone FROM recordings WHERE ? != '' AND scope = ? AND seq = ?\",",
        on_memory("recording"),
    ),
    Bug(
        "a kill from outside that counts against its request",
        f"{SQLITE}/leases.py",
        "own, most = row[0] - self.kills.get(request_id, 0), refusals.MOST_DEATHS",
        "own, most = row[0], refusals.MOST_DEATHS",
        on_memory("killed_from_outside_runs_again"),
    ),
    Bug(
        "jobs that stay with a worker that serves another base model now",
        f"{SQLITE}/leases.py",
        "            self._end(tx, row[0], orphans, died=True)",
        "            self._end(tx, row[0], _Orphans(), died=True)",
        on_memory("serves_another_base_model_now"),
    ),
    Bug(
        "a reserve that takes no space on the disk",
        f"{SQLITE}/reserve.py",
        "os.posix_fallocate(descriptor, 0, size_bytes)",
        "os.ftruncate(descriptor, size_bytes)",
        ("tests/engine/store/sqlite/test_reserve.py",),
    ),
    Bug(
        "a Redis store that takes results of a worker that has lost the job",
        f"{REDIS}/finish.lua",
        "if is_unfinished(job[1]) and job[2] ~= epoch then",
        "if is_unfinished(job[1]) and not job[2] then",
        on_redis("results_of_a_job_placed_with_another_worker"),
    ),
    Bug(
        "a Redis store that trims the log of the point to fall back on",
        f"{REDIS}/save_point.lua",
        "local older = call('LINDEX', points, 1)",
        "local older = call('LINDEX', points, 0)",
        on_redis("the_log_starts_at_the_older_point"),
    ),
    Bug(
        "a Redis store in which a client drops the results of another",
        f"{REDIS}/acknowledge.lua",
        "call('ZREM', of_client, id) == 1 and ",
        "call('ZREM', of_client, id) >= 0 and ",
        on_redis("acknowledged_results"),
    ),
    # --- files in a bucket ------------------------------------------------------------------------
    Bug(
        "a writer that takes its own manifest for another's",
        f"{ENGINE}/store/object_files.py",
        "if made.content != content:  #",
        "if made.content != content or made.repeated:  #",
        BUCKET_TESTS,
    ),
    Bug(
        "members go although their manifest may still appear",
        f"{ENGINE}/store/object_files.py",
        'made = self._bucket.create(f"ids/{file_id}", content)',
        'self._forget(manifest, file_id); made = self._bucket.create(f"ids/{file_id}", content)',
        BUCKET_TESTS,
    ),
    Bug(
        "dates of objects are taken as exact",
        f"{ENGINE}/store/object_files.py",
        "_ERROR_S = 2.0",
        "_ERROR_S = 0.0",
        BUCKET_TESTS,
    ),
    Bug(
        "a manifest that moves during the clean-up is missed",
        f"{ENGINE}/store/object_files.py",
        'for prefix in ("ids/", "quarantine/", "ids/"):',
        'for prefix in ("ids/", "quarantine/"):',
        BUCKET_TESTS,
    ),
    Bug(
        "a copy is served although its file was written anew",
        f"{ENGINE}/store/file_cache.py",
        "is_whole = (folder / _VERSION).read_text() == token",
        "is_whole = (folder / _VERSION).exists()",
        BUCKET_TESTS,
    ),
    Bug(
        "any 404 counts as a missing object",
        f"{ENGINE}/store/bucket.py",
        'if verb != "date" and "NoSuchKey" not in text:',
        "if False:",
        ("tests/engine/store/test_bucket.py",),
    ),
    Bug(
        "a model whose files are away is lost",
        f"{ENGINE}/worker/models/recovery.py",
        "            except FilesAway:\n                raise\n",
        "",
        ("tests/engine/worker/models/test_recovery_edge_cases.py",),
    ),
    # --- files ------------------------------------------------------------------------------------
    Bug(
        "a store that deletes files although it is older than they are",
        f"{ENGINE}/store/ownership.py",
        "    if reached > known:\n",
        "    if reached > known + 1:\n",
        ("tests/engine/store/test_ownership.py",),
    ),
    Bug(
        "a moved store that removes files which its original may name",
        f"{ENGINE}/store/ownership.py",
        "        if not facts.has_moved:\n            return set()\n",
        "        return set()\n",
        ("tests/server/cleanup/test_unused_files.py", "-k", "moved"),
    ),
    Bug(
        "a released file that is deleted although a record names it",
        f"{SERVER}/cleanup/unused_files.py",
        "released = await self._store.released_files() - in_use",
        "released = await self._store.released_files()",
        ("tests/server/cleanup/test_unused_files.py",),
    ),
    Bug(
        "a write that uses the room kept for accepted work",
        f"{ENGINE}/process/disk_room.py",
        "if free - size < min_free_bytes:",
        "if free < min_free_bytes:",
        ("tests/engine/process/test_disk_room.py",),
    ),
    # --- the API ----------------------------------------------------------------------------------
    Bug(
        "a compressed body that grows by any ratio",
        f"{SERVER}/http/incoming.py",
        "if size > max(FREE_OF_RATIO_BYTES, MAX_RATIO * len(raw)):",
        "if size > limit:",
        ("tests/server/http/test_incoming.py", "-k", "ratio"),
    ),
    Bug(
        "a deadline that an earlier burst puts off",
        f"{SERVER}/http/body.py",
        "min(deadline_s + size / SLOWEST_BYTES_S, latest_s)",
        "deadline_s + size / SLOWEST_BYTES_S",
        ("tests/server/http/test_body.py", "-k", "fast_start"),
    ),
    Bug(
        "body memory that an abandoned request keeps",
        f"{SERVER}/http/shares.py",
        "            if waiter.granted.done():\n"
        "                self._live.discard(share)\n"
        "                self._add(share, -share.size)\n",
        "            if waiter.granted.done():\n                self._live.discard(share)\n",
        ("tests/server/http/test_shares.py",),
    ),
    Bug(
        "a page of another site that may read the dashboard",
        f"{SERVER}/access/hosts.py",
        "if path in self._open_paths or path.startswith(self._page):",
        "if path in self._open_paths:",
        ("tests/server/access/test_hosts.py",),
    ),
    Bug(
        "a revoked key that still opens the door",
        f"{SERVER}/access/auth.py",
        "if key is None or not is_right or not key.is_valid(self._wall_clock()):",
        "if key is None or not is_right:",
        ("tests/server/access/test_auth.py", "-k", "every_invalid_key"),
    ),
    Bug(
        "a key that may only sample and yet trains",
        f"{SERVER}/access/scopes.py",
        "    if scopes.isdisjoint(wanted):\n",
        "    if not scopes:\n",
        ("tests/server/access/test_scopes.py", "-k", "outside_its_scopes"),
    ),
    Bug(
        "a budget that other tenants use up",
        f"{SERVER}/access/budgets.py",
        "await self._store.usage(tenant, now_s)",
        "await self._store.usage(None, now_s)",
        ("tests/server/access/test_budgets.py",),
    ),
    Bug(
        "sessions that expire because another process could not hear them",
        f"{SERVER}/cleanup/sweeper.py",
        "        if not (is_steady and hears_all):\n",
        "        if not is_steady:\n",
        ("tests/server/cleanup/test_awake.py", "-k", "stopped_process"),
    ),
    Bug(
        "a stop string in the prompt that cuts an echo",
        f"{SERVER}/openai/responses.py",
        "said = whole[:start] + cut_at(whole[start:], command.stop_strings or [])",
        "said = cut_at(whole, command.stop_strings or [])",
        ("tests/server/openai/test_routes.py", "-k", "stop_string_in_the_prompt"),
    ),
    Bug(
        "an echo whose likeliest tokens are those of the token before",
        f"{SERVER}/openai/responses.py",
        "top = _likeliest(response.topk_prompt_logprobs, place, text)",
        "top = _likeliest(response.topk_prompt_logprobs, place - 1, text)",
        ("tests/server/openai/test_routes.py", "-k", "echo_starts_with"),
    ),
    Bug(
        "training on the samples of another session",
        f"{ENGINE}/core/provenance.py",
        "    if scope != session_id:\n",
        "    if not scope:\n",
        ("tests/engine/core/test_provenance.py",),
    ),
    Bug(
        "a service that ran for days and is given up after a few deaths",
        f"{SERVER}/cli/supervisor.py",
        "if young_deaths >= self._policy.most_young_deaths and not self._was_ready:",
        "if young_deaths >= self._policy.most_young_deaths:",
        ("tests/server/cli/test_supervisor.py", "-k", "ready_once"),
    ),
    # --- the client -------------------------------------------------------------------------------
    Bug(
        "a download link that gets the API key",
        f"{CLIENT}/transport.py",
        '        del request.headers["X-API-Key"]\n',
        "",
        ("tests/client/test_transport.py",),
    ),
    Bug(
        "slices of long datums at the pace of short ones",
        f"{ENGINE}/worker/scheduling/pace.py",
        "nearest = min(rates, key=lambda known: (abs(known - bits), -known))",
        "nearest = min(rates)",
        (f"{WORKER_TESTS}/scheduling/test_pace.py",),
    ),
    Bug(
        "large bodies of many requests in one transaction",
        f"{SQLITE}/group_commit.py",
        "while self._large and size < GROUP_BYTES:",
        "while self._large:",
        ("tests/engine/store/sqlite/test_group_commit.py",),
    ),
    Bug(
        "a mean over parts that forgets their sizes",
        f"{CLIENT}/codec.py",
        "return float(np.average(values, weights=counts))",
        "return float(np.average(values))",
        ("tests/client/test_codec.py",),
    ),
)
