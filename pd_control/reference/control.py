"""The reference engine's side of :mod:`pd_control.engine`: what it tells the driver, what it is told.

Core thread, except :meth:`ControlPort.wake` and :meth:`ControlPort.on_fatal`. A request says by its
``control`` fields what part it plays; they are those of vLLM's ``kv_transfer_params``:

``do_remote_decode``
    P's half in dual mode: prefill, hold the KV for ``num_takers`` (1) decoders, generate one token.
``do_remote_prefill``
    D: the KV comes from a P. ``mode`` is ``dual`` (default; P knows the request as ``transfer_id``) or
    ``single`` (D hands it to a P). ``remote_engine_id`` names P's instance, ``remote_host`` and
    ``remote_port`` its control address; ``on_failure`` is ``fail``, ``recompute`` or ``retry``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pd_control.codes import Code
from pd_control.engine import (
    BlockIds,
    Content,
    DecodeDriver,
    DecodeRequest,
    Mode,
    OnFailure,
    PrefillDriver,
    RankReport,
    Refusal,
    ScheduledRequest,
    identity_digest,
)
from pd_control.reference.sampling import SamplingParams
from pd_control.reference.scheduler import Scheduler, Sequence, StepPlan
from simple_rpc import Address

#: Told of a request's tokens and of its end: (sequence, tokens, finish reason or None, error).
Tell = Callable[[Sequence, list[int], "str | None", str], None]


class ControlError(ValueError):
    """A request's ``control`` fields do not make sense; the message names the field."""


class ControlPort:
    """Binds one engine's scheduler to its drivers; implements :class:`pd_control.engine.Engine`.

    Args:
        model: names what the KV is of; two engines exchange KV only if theirs are equal.
        wake, fatal: the engine's own, safe on any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: str,
        tell: Tell,
        wake: Callable[[], None],
        fatal: Callable[[str], None],
    ) -> None:
        self._scheduler, self._model, self._tell = scheduler, model, tell
        self._wake, self._fatal = wake, fatal
        self.prefill: PrefillDriver | None = None
        self.decode: DecodeDriver | None = None
        self._remote: set[str] = set()  # on D's driver, until it has said how that ended
        self._unplaced: deque[Sequence] = deque()  # on D, waiting for blocks
        self.num_tokens_loaded = 0  # whose KV came from a P
        self._told_by_driver = ""  # the request that the driver itself is ending
        scheduler.before_finish = self._before_finish
        scheduler.before_preempt = self._before_preempt

    # -- what the engine's core calls -------------------------------------------------------------

    def drain(self) -> None:
        """Execute what the drivers have for the engine."""
        if self.decode is not None:
            self.decode.drain()
        if self.prefill is not None:
            self.prefill.drain()

    def add(self, sequence: Sequence, control: dict[str, Any]) -> None:
        """Take a request in, in whatever part its ``control`` fields give it.

        Raises:
            ControlError, ValueError: it is refused and nothing has happened.
        """
        if control.get("do_remote_prefill"):
            if self.decode is None:
                raise ControlError("do_remote_prefill: this engine has no decode role")
            request = self._decode_request(sequence, control)
            self._scheduler.add(sequence, parked=True)
            self.decode.add(request)
            self._remote.add(sequence.request_id)
            self._unplaced.append(sequence)
        elif control.get("do_remote_decode"):
            if self.prefill is None:
                raise ControlError("do_remote_decode: this engine has no prefill role")
            takers = control.get("num_takers", 1)
            if type(takers) is not int or not 1 <= takers <= 64:
                raise ControlError(f"num_takers: expected 1 to 64, got {takers!r}")
            self._scheduler.add(sequence)
            self.prefill.add(sequence.request_id, self._content(sequence), takers)
        else:
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Before the engine finishes a request on its client's word."""
        if request_id in self._remote and self.decode is not None:
            self._remote.discard(request_id)
            self.decode.abort(request_id, "aborted by its client")

    def place(self) -> None:
        """Give waiting D requests their blocks, in order, as far as blocks are free."""
        while self._unplaced and self.decode is not None:
            sequence = self._unplaced[0]
            if sequence.request_id not in self._scheduler.sequences:
                self._unplaced.popleft()
                continue
            if not self._scheduler.claim_prompt_blocks(sequence, len(sequence.token_ids)):
                return
            self._unplaced.popleft()
            # False: it has ended meanwhile; the driver's word on that is in the queue.
            self.decode.blocks_allocated(
                sequence.request_id, (tuple(sequence.block_ids),), sequence.num_cached
            )

    def plan(self, plan: StepPlan) -> bytes | None:
        """What the workers must know of a step; None without a prefill role."""
        if self.prefill is None:
            return None
        scheduled = []
        for part in plan.scheduled:
            sequence = part.sequence
            added = tuple(sequence.block_ids[sequence.num_planned_blocks :])
            sequence.num_planned_blocks = len(sequence.block_ids)
            end = part.first_token + part.num_tokens
            scheduled.append(ScheduledRequest(sequence.request_id, part.first_token, end, (added,)))
        return self.prefill.plan_step(plan.step, scheduled)

    def step_finished(self, step: int, reports: list[RankReport]) -> None:
        if self.prefill is not None:
            self.prefill.step_finished(step, reports)

    def tell_blocks_wanted(self) -> None:
        """P's driver hears after each pass how many blocks are missing."""
        if self.prefill is None:
            return
        missing = self._scheduler.num_blocks_missing
        if self._unplaced:  # on an engine of both roles, what P holds can be in the way of D
            num_tokens = len(self._unplaced[0].token_ids)
            missing = max(missing, self._scheduler.num_missing_for(num_tokens))
        self.prefill.blocks_wanted(missing)

    # -- what the scheduler tells ------------------------------------------------------------------

    def _before_finish(self, sequence: Sequence, reason: str) -> None:
        if self.prefill is None or sequence.request_id == self._told_by_driver:
            return
        if reason in ("stop", "length"):
            first = sequence.token_ids[sequence.num_prompt]
            self.prefill.finished(sequence.request_id, Code.OK, first)
        else:
            code = Code.ABORTED if reason == "abort" else Code.INTERNAL
            self.prefill.finished(sequence.request_id, code)

    def _before_preempt(self, sequence: Sequence) -> None:
        if self.prefill is not None:
            self.prefill.preempted(sequence.request_id)

    # -- pd_control.engine.Engine -------------------------------------------------------------------

    def hold_blocks(self, block_ids: BlockIds) -> None:
        self._scheduler.pool.acquire(block_ids[0])

    def release_blocks(self, block_ids: BlockIds) -> None:
        self._scheduler.pool.release(block_ids[0])

    def void_rank(self, rank: int) -> None:
        """Only the cache is left to clear: this engine dies with a worker and computes nothing on."""
        self._scheduler.pool.forget(range(self._scheduler.pool.num_blocks))

    def wake(self) -> None:
        self._wake()

    def on_fatal(self, reason: str) -> None:
        self._fatal(reason)

    def request_loaded(self, request_id: str, num_tokens: int, first_token: int | None) -> None:
        self._remote.discard(request_id)
        sequence = self._scheduler.sequences[request_id]
        self.num_tokens_loaded += max(0, num_tokens - sequence.num_cached)
        if first_token is None:
            self._scheduler.admit(request_id, num_tokens)
            return
        sequence.token_ids.append(first_token)
        self._scheduler.admit(request_id, num_tokens)
        reason = self._scheduler.reason_to_end(sequence)
        if reason is not None:
            self._scheduler.finish(request_id, reason)
        self._tell(sequence, [first_token], reason, "")

    def request_failed(self, request_id: str, code: Code, message: str) -> None:
        self._remote.discard(request_id)
        sequence = self._scheduler.finish(request_id, "error")
        if sequence is not None:
            self._tell(sequence, [], "error", f"{code.name}: {message}")

    def recompute_request(self, request_id: str, code: Code, message: str) -> None:
        self._remote.discard(request_id)
        self._scheduler.recompute(request_id)

    def admit_request(self, request_id: str, content: Content, payload: Any) -> Refusal | None:
        try:
            sampling, salt = _parse_payload(payload)
            sequence = Sequence(request_id, list(content.token_ids), sampling, salt=salt)
            if self._content(sequence).identity != content.identity:
                return Refusal(
                    Code.BAD_REQUEST, f"the KV wanted is not that of model {self._model!r} here"
                )
            self._scheduler.add(sequence)
        except ValueError as error:
            return Refusal(Code.BAD_REQUEST, str(error))
        return None

    def abort_request(self, request_id: str, code: Code, message: str) -> None:
        self._told_by_driver = request_id
        sequence = self._scheduler.finish(request_id, "abort")
        self._told_by_driver = ""
        if sequence is not None:
            self._tell(sequence, [], "abort", f"{code.name}: {message}")

    # -- helpers ------------------------------------------------------------------------------------

    def _content(self, sequence: Sequence) -> Content:
        identity = identity_digest(self._model, cache_salt=sequence.salt.hex())
        return Content(tuple(sequence.token_ids[: sequence.num_prompt]), identity)

    def _decode_request(self, sequence: Sequence, control: dict[str, Any]) -> DecodeRequest:
        def text(name: str, default: str = "") -> str:
            value = control.get(name, default)
            if not isinstance(value, str):
                raise ControlError(f"{name}: expected a string, got {type(value).__name__}")
            return value

        mode = text("mode", "dual")
        if mode not in ("single", "dual"):
            raise ControlError(f"mode: expected 'single' or 'dual', got {mode!r}")
        remote_id = text("transfer_id") or text("remote_request_id")
        if mode == "dual" and not remote_id:
            raise ControlError("transfer_id: dual mode needs the id under which P has the request")
        address = ""
        if control.get("remote_host"):
            port = control.get("remote_port")
            if type(port) is not int or not 0 < port < 65536:
                raise ControlError(f"remote_port: expected 1 to 65535, got {port!r}")
            address = str(Address.tcp(text("remote_host"), port))
        policy = text("on_failure")
        if policy and policy.upper() not in OnFailure.__members__:
            raise ControlError(f"on_failure: expected fail, recompute or retry, got {policy!r}")
        payload: dict[str, Any] = {"sampling": asdict(sequence.sampling) | {"max_tokens": 1}}
        if sequence.salt:
            payload["salt"] = sequence.salt
        return DecodeRequest(
            sequence.request_id,
            self._content(sequence),
            mode=Mode.SINGLE if mode == "single" else Mode.DUAL,
            peer_instance=text("remote_engine_id"),
            peer_address=address,
            remote_request_id=remote_id if mode == "dual" else "",
            payload=payload,
            on_failure=OnFailure[policy.upper()] if policy else None,
        )


def _parse_payload(payload: Any) -> tuple[SamplingParams, bytes]:
    """What D's engine sent along with a PREFILL; it comes from the network."""
    if not isinstance(payload, dict):
        raise ControlError(f"payload: expected a map, got {type(payload).__name__}")
    fields, salt = payload.get("sampling", {}), payload.get("salt", b"")
    if not isinstance(fields, dict) or not isinstance(salt, bytes) or len(salt) > 64:
        raise ControlError("payload: expected sampling as a map and salt as at most 64 bytes")
    known = {"temperature": (int, float), "top_p": (int, float), "seed": int, "ignore_eos": bool}
    clean = {k: v for k, v in fields.items() if k in known and isinstance(v, known[k])}  # type: ignore[arg-type]
    return SamplingParams(**clean, max_tokens=1), salt
