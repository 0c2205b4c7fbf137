"""The logprobs of samples as training computes them, by training's programs.

Sampling computes a sequence token by token, training all of it at once: in float32 the logprobs
differ in the last bits, in bfloat16 by more, and a policy loss takes the ratio of the two. The
logprobs computed here have the bits of ``forward`` and ``forward_backward``, however a request
packs the datum.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import (
    Backend,
    DeviceFailed,
    SampledSequence,
    SampleResult,
    SamplingRequest,
)
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.device_timer import DeviceTimer
from tuneserve_engine.worker.execution.packing import PackingRequest, pack, unpack

_UNTRAINED = AdapterConfig(rank=1, alpha=1.0, seed=0)
"""An adapter whose B is zero: the base model."""


class Rescoring:
    """The rescoring of samples: training's logprobs replace their own.

    ``read`` returns the state of a snapshot, of any kind.
    """

    def __init__(
        self,
        backend: Backend,
        timer: DeviceTimer,
        read: Callable[[str], AdapterState],
    ) -> None:
        self._backend = backend
        self._timer = timer
        self._read = read

    def rescore(
        self,
        asked: Mapping[str, SamplingRequest],
        finished: Mapping[str, SampleResult | Exception],
    ) -> dict[str, SampleResult | Exception]:
        """Return the rescored results, with the error of each that could not be scored.

        Samples at temperatures other than 0 and 1 keep their logprobs: training has no temperature.
        """
        scored = dict(finished)
        for name, result in finished.items():
            if isinstance(result, Exception) or asked[name].temperature not in {0.0, 1.0}:
                continue
            if not asked[name].max_tokens:  # nothing was drawn
                continue
            try:
                scored[name] = self._scored(name, asked[name], result)
            except DeviceFailed:
                raise
            except Exception as error:
                scored[name] = error
        return scored

    def _scored(self, name: str, request: SamplingRequest, result: SampleResult) -> SampleResult:
        adapter_id = f"rescoring {request.snapshot_id or ''}"
        sequences = list(result.sequences)
        texts = [_text(request, each) for each in sequences]
        rank = self._load(adapter_id, request.snapshot_id)
        try:
            asked = [PackingRequest(adapter_id, rank, text) for text in texts]
            for packed in pack(asked, self._backend.static_shapes):
                with self._timer.charge({name: 1.0}):
                    outputs = self._backend.forward_backward(packed.batch).outputs
                for member, index in enumerate(packed.members):
                    ((logprobs,), _) = unpack(packed, outputs, member, texts[index])
                    drawn = sequences[index]
                    sequences[index] = replace(drawn, logprobs=logprobs[-len(drawn.tokens) :])
        finally:
            self._backend.delete_adapter(adapter_id)
        return replace(result, sequences=tuple(sequences))

    def _load(self, adapter_id: str, snapshot_id: str | None) -> int:
        """Load the adapter and return its rank."""
        if snapshot_id is None:
            self._backend.create_adapter(adapter_id, _UNTRAINED)
            return _UNTRAINED.rank
        state = self._read(snapshot_id)
        self._backend.load_adapter(adapter_id, AdapterState(state.config, state.weights))
        return state.config.rank


def _text(request: SamplingRequest, sequence: SampledSequence) -> TrainingData:
    """Return the prompt and the drawn tokens as one datum; prompt targets have weight 0."""
    text = np.concatenate([request.prompt, sequence.tokens]).astype(np.int32)
    weights = np.zeros((len(text) - 1, 1), np.float32)
    weights[len(request.prompt) - 1 :] = 1.0
    datum = DecodedDatum(text[:-1], text[1:, None], weights, flat=True)
    return TrainingData("cross_entropy", {}, forward_only=True, data=[datum])
