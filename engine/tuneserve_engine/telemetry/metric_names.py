"""The metrics that a worker reports while it runs: their names and descriptions.

Metrics that end in ``_total`` only grow while the process lives; the others go up and down.
"""

WORKER_METRICS = {
    "ready": "1 once every program is compiled or has failed to compile. The worker takes requests "
    "before that, too.",
    "programs": "The number of programs that requests can need.",
    "programs_compiled": "The number of these programs that are compiled.",
    "programs_failed": "The number of these programs that cannot be compiled; requests that need "
    "one fail.",
    "compilations_after_ready_total": "The number of programs compiled after the worker was ready; "
    "0 is expected.",
    "units_total": "The number of batches that ran.",
    "tokens_trained_total": "The number of tokens in forward_backward requests, without padding.",
    "tokens_computed_total": "The number of tokens computed for forward_backward requests, padding "
    "included.",
    "policy_tokens_total": "The number of tokens in policy losses whose advantage is not 0.",
    "policy_logprob_gap_total": "The sum, over these tokens, of the absolute difference between "
    "the trainer's logprob and the logprob that came with the token. It combines the difference "
    "between sampler and trainer with the effect of training since the sample.",
    "tokens_sampled_total": "The number of tokens sampled.",
    "lane_steps_total": "The number of decode steps, counted once per decode slot, idle slots "
    "included. Divide tokens_sampled_total by it for the share of slots in use.",
    "decode_slots": "The number of sequences that the worker decodes together.",
    "sequences_unfinished": "The number of sequences, of samples, that wait for this worker or run "
    "on it. Compare it with decode_slots to decide about more workers.",
    "samples_preempted_total": "The number of sequences that lost their KV pages to others and "
    "started anew. They get the same tokens.",
    "prompt_tokens_total": "The number of tokens in the prompts of samples, counted once per "
    "request.",
    "prompt_tokens_read_total": "The number of these prompt tokens that were computed. The others "
    "came from the KV cache.",
    "adapters": "The number of adapters of this worker's models.",
    "adapters_on_device": "The number of these adapters that are in the device's memory.",
    "adapters_paged_in_total": "The number of adapters loaded into the device's memory.",
    "adapters_paged_out_total": "The number of adapters evicted from the device's memory.",
    "points_unreadable_total": "The number of recovery points that were missing or damaged when a "
    "model was restored. An older point and the log took their place, or the model was lost; see "
    "the worker's log.",
    "weights_to_decompose": "The number of the base model's weights that are being decomposed for "
    "adapters of kind osft; 0 at other times.",
    "weights_decomposed": "The number of these weights whose decomposition is done.",
    "device_seconds_total": "The device time that batches took.",
    "device_seconds_overhead_total": "The part of this time that is charged to no request: replay, "
    "failed passes, and samples abandoned when a worker stopped.",
    "host_seconds_total": "The time in which there was work but the device was idle: the host was "
    "busy, or adapters were being loaded.",
    "model_flops_total": "The model FLOPs of requests that have ended: 4 per token and parameter "
    "for gradients, 2 for a forward pass alone.",
    "device_peak_flops": "The peak FLOPs per second of the device, as given by the setting "
    "device_peak_flops; 0 without it.",
    "memory_base_model_bytes": "The device memory planned for the base model's weights. This "
    "metric and the next four add up to all the memory that the worker takes.",
    "memory_training_bytes": "The device memory planned for the computation of training.",
    "memory_sampling_bytes": "The device memory planned for sampling: snapshots, the KV cache, "
    "adapter slots and the computation.",
    "memory_adapters_bytes": "The device memory planned for adapters with their moments and "
    "gradients.",
    "memory_free_bytes": "The device memory kept free for other needs of programs and for "
    "fragmentation.",
    "page_wait_seconds_total": "The time that batches waited for their adapters; part of "
    "tuneserve_host_seconds_total.",
}
"""The descriptions of the metrics, by the names under which a worker reports them."""
