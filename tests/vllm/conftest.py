"""These tests need a venv with vLLM (tools/vllm_venv.sh); the stage ``vllm`` of .ci/run runs them there."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
