"""A worker process without a model, whose base model has the embedded tokenizer and 4,096 tokens of
context: ``speaking_worker.py <data directory>``.
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from tests.support import fake_worker
from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.settings.common import TINY_MODEL

if __name__ == "__main__":
    info = replace(
        FAKE_INFO, context_length=4096, vocab_size=1024, tokenizer_id=str(TINY_MODEL.resolve())
    )
    asyncio.run(fake_worker.main(Path(sys.argv[1]), info))
