"""A short run of the fuzz target; the long one is ``python -m tests.fuzz.rpc_frames``."""

from __future__ import annotations

import logging

import pytest

from tests.fuzz.rpc_frames import Fuzzer


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_frames_get_nowhere(seed):
    logging.disable(logging.CRITICAL)
    try:
        fuzzer = Fuzzer(seed)
        await fuzzer.run(3000)
    finally:
        logging.disable(logging.NOTSET)
    assert fuzzer.num_frames >= 3000
