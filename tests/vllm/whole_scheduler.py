"""The undivided engine to compare with: it splits off the last prompt token, as D does.

A prompt computed in one piece and one whose last token is computed in a step of its own differ in rounding;
what is compared must not. One request at a time.
"""

from __future__ import annotations

from typing import Any


def make_scheduler(*args: Any, **kwargs: Any) -> Any:
    """For ``--scheduler-cls``."""
    from vllm.v1.core.sched.scheduler import Scheduler

    class SplitLast(Scheduler):  # type: ignore[misc]
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            threshold = 0
            for request in (*self.waiting, *self.running):
                computed = request.num_computed_tokens
                if request.num_prompt_tokens - 1 > computed:
                    threshold = request.num_prompt_tokens - 1 - computed
            self.scheduler_config.long_prefill_token_threshold = threshold
            return super().schedule(*args, **kwargs)

    return SplitLast(*args, **kwargs)
