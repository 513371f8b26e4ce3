"""The pure core: every decision of the control plane, and no I/O.

Theory of operation
===================

**Who owns what.** Four objects, two threads per scheduler process.

=================  ===========  ====================================================================
object             thread       owns
=================  ===========  ====================================================================
`PrefillCore`      loop, P      P requests (holds), P transfers, steps in flight, the journal
`DecodeCore`       loop, D      D requests, grants, peers and their links, completions
`StepPlanner`      core, P      which sends ride which main step; the P engine's leases
`LeaseTable`       core, both   references on engine blocks (inside the planner on P)
=================  ===========  ====================================================================

No object is touched by two threads. What passes between the threads of a process are the frozen
values of `events` (core thread → loop thread) and `effects` (loop thread → core thread), through
two queues that keep their order. Nothing else is shared.

**A core is a function.** `core.handle(event, now_s) -> list[Effect]`. Time is an argument: seconds
on any clock that never goes back. A core reads no clock, draws no random number, starts nothing and
raises only for a fault of this program (`InvariantError`; the driver then calls the embedder's
`on_fatal`). What a peer, worker or engine sends at a wrong moment never raises. *The one rule for
illegal input*: a (state, input) pair that is not in the transition table changes nothing and is
counted under `ignored.<machine>.<STATE>.<INPUT>`.

**What a driver guarantees**

1. Effects of one `handle` are executed in the order given, and completely before the effects of the
   next `handle` that are bound for the same place (peer, worker, core thread).
2. `next_deadline()` is looked at after each `handle`; at that time or later (never earlier) the
   driver calls `handle(Tick(), now_s)`. Late ticks are harmless.
3. Each `Call` ends in exactly one `CallResult` with its `call_id`: the peer's answer, or a code
   from the driver (UNREACHABLE, TIMEOUT, PEER_LOST …). The core gives up at the call's deadline by
   itself, so a driver that never reports only wastes memory.
4. Each `OpenLink` ends in one `LinkUp` or one `LinkFailed` with its `link_id`; each `LinkUp` is
   followed by at most one `LinkDown`. The acceptor's driver posts `LinkUp` to its own core *before*
   the opener learns of success. News on a link arrives in order, each item once, and only between
   that link's `LinkUp` and `LinkDown`.
5. Each incoming PREF or TRKV (an event with a `call_ref`) is answered by exactly one `Answer`
   with that `call_ref`, in the effects of the same `handle`.
6. News for one worker incarnation arrives there in order, each item once, or the worker dies.
   News from one worker incarnation arrives in order, each item once, and never after that
   incarnation's `WorkerDied` or the `WorkerRegistered` of the next.
7. A `CoreCommand` effect is put on the core thread's queue and the core thread is woken. There:
   `OfferTransfer`, `WithdrawTransfer`, `ForgetRequest` and `ReleaseLease` go to `StepPlanner.apply`,
   whose events are posted to the loop (on D `ReleaseLease` goes to `LeaseTable.release`); the
   others are calls on the engine. `AdmitRequest` is answered within its execution. The queue is drained
   when the thread is woken and at the start of each `plan_step`.
8. Events made on the core thread are posted in the order in which they were made.

**What a worker guarantees** (kvt does): see `messages.CancelSend`, `GrantAck`, `LoadDoneItem`,
`SendDoneItem`. In short: each (transfer, target) submitted ends in exactly one SEND_DONE; a cancel
is always answered; a LOAD_DONE and the acknowledgement of a close each come after the last byte
that could land.

**Ownership of sends on P.** Each transfer's tokens are planned by exactly one thread at a time, and
who that is follows from facts that both threads see in the same order, so no lock and no barrier
is needed:

* The core thread plans a transfer in a step if the offer has reached it and the step computes
  tokens of [.., max_tokens) of that *residence* of the request (a preemption ends a residence;
  offers name theirs).
* Once the loop thread has seen the `StepPlanned` of the step that computes the last wanted token,
  no later step of that residence can carry the transfer. If that plan does not carry it either, it
  is the loop's: substep, or frozen send.
* A request ends with `ForgetRequest`. The core thread answers `RequestForgotten`, after which no plan
  names it; if it had planned a send that the loop had not seen when it decided, the leases wait for
  the loop, which by then has seen that plan and commands `ReleaseLease` when those sends have ended.
"""
