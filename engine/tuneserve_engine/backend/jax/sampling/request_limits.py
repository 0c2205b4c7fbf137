"""The limits of a request that the device's numbers and the programs' widths set."""

from dataclasses import replace

import numpy as np

from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.backend.jax.sampling.programs import MAX_TOP_TOKENS
from tuneserve_engine.core.errors import UserError


def within_limits(request: SamplingRequest, vocab_size: int) -> SamplingRequest:
    """Return the request with numbers that the device has.

    Python's numbers are wider; values beyond the device's range mean its limit. Raises
    ``UserError`` if more top, alternative or target tokens are asked for than are computed.
    """
    targets = 0 if request.targets is None else request.targets.shape[1]
    widest = max(request.topk_prompt, request.topk_sample, request.alt_tokens, targets)
    if widest > MAX_TOP_TOKENS:
        raise UserError(
            f"a sample asks for {widest} top, alternative or target tokens per position; at most "
            f"{MAX_TOP_TOKENS} are computed; ask for fewer"
        )
    return replace(
        request,
        top_k=min(request.top_k, np.iinfo(np.int32).max),
        temperature=min(request.temperature, float(np.finfo(np.float32).max)),
        topk_prompt=min(request.topk_prompt, vocab_size),
        topk_sample=min(request.topk_sample, vocab_size),
    )
