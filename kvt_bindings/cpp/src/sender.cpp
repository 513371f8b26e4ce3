// The sender's public face and the engine's side of it: what a call does before it returns.
#include "kvt/sender.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "sender_impl.h"

namespace kvt {
namespace {

void must(const Status& status) {
  if (!status.ok()) throw Error(status.code, status.detail);
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::size_t num_legs(const Send& send) {
  return send.is_delta ? 0 : send.targets.size();
}

}  // namespace

TimelinePart Sender::Impl::part_of(Send send) {
  if (send.end_token < send.first_token) {
    throw Error(Code::kBadRequest, "tokens [" + std::to_string(send.first_token) + ", " +
                                       std::to_string(send.end_token) + ")");
  }
  if (!send.is_delta && send.targets.empty()) throw Error(Code::kBadRequest, "no target ranks");
  TimelinePart part;
  part.id = next_part_++;
  // What goes with the last token (state, a partly filled cell) needs its layers even if the range
  // itself is empty; a transfer that wants nothing at all needs none.
  const bool has_tokens = send.first_token < send.end_token;
  if (send.last && (has_tokens || send.is_delta)) {
    part.layers = layers_.all;
  } else if (has_tokens) {
    part.layers = layers_.tokens;
  }
  part.send = std::make_shared<const Send>(std::move(send));
  return part;
}

void Sender::Impl::reserve(const std::vector<TimelinePart>& parts) {
  std::size_t legs = 0;
  for (const TimelinePart& part : parts) legs += num_legs(*part.send);
  if (legs > 0 && !sink_->reserve(legs)) {
    throw Error(Code::kBusy, "no room for " + std::to_string(legs) + " more completions");
  }
}

void Sender::Impl::must_be_open() const {
  if (closing_.load(std::memory_order_relaxed)) throw Error(Code::kAborted, "the sender is closed");
}

void Sender::Impl::begin_scheduler(const Incarnation& scheduler) {
  must_be_open();
  TimelineEffects effects;
  const std::lock_guard lock(timeline_mutex_);
  must(timeline_.begin_scheduler(scheduler, effects));
  route(effects, true);
}

void Sender::Impl::end_scheduler(const Incarnation& scheduler) {
  TimelineEffects effects;
  const std::lock_guard lock(timeline_mutex_);
  if (timeline_.scheduler() != scheduler) return;
  timeline_.end_scheduler(effects);
  route(effects, true);
}

void Sender::Impl::submit(const Incarnation& scheduler, StepId step, Send send) {
  must_be_open();
  TimelinePart part = part_of(std::move(send));
  const std::size_t legs = num_legs(*part.send);
  reserve({part});
  Status status;
  {
    const std::lock_guard lock(timeline_mutex_);
    status = timeline_.submit(scheduler, step, std::move(part));
  }
  if (status.ok()) return;
  if (legs > 0) sink_->release(legs);
  must(status);
}

void Sender::Impl::start_step(const Incarnation& scheduler, StepId step, std::uint64_t sched_tokens,
                              std::uint32_t records_per_layer) {
  must_be_open();
  TimelineEffects effects;
  const std::lock_guard lock(timeline_mutex_);
  must(timeline_.start_step(scheduler, step, sched_tokens, records_per_layer, effects));
  Status prepared;
  while (prepared.ok() && num_prepared_sets_ < timeline_.num_event_sets()) {
    prepared = events_->prepare(num_prepared_sets_);
    num_prepared_sets_ += prepared.ok() ? 1 : 0;
  }
  // A step without events cannot be recorded: its sends fail by name, and the caller hears why.
  if (!prepared.ok()) (void)timeline_.flush(step, now_s(), effects);
  route(effects, true);
  must(prepared);
}

void Sender::Impl::record_event(StepId step, std::uint16_t layer, std::uintptr_t stream) {
  const std::lock_guard lock(timeline_mutex_);
  std::uint32_t set = 0;
  must(timeline_.event_set_for(step, layer, &set));
  must(events_->record({set, static_cast<std::uint32_t>(layer - layers_.first)}, stream));
  ++num_records_;
  scratch_.clear();
  must(timeline_.recorded(step, layer, scratch_));
  if (scratch_.empty()) {
    update_awaits();
  } else {
    route(scratch_, true);
  }
}

SubstepId Sender::Impl::freeze_step(StepId step) {
  TimelineEffects effects;
  SubstepId taken = 0;
  const std::lock_guard lock(timeline_mutex_);
  must(timeline_.freeze(step, &taken, effects));
  route(effects, true);
  return taken;
}

void Sender::Impl::flush_step(StepId step) {
  TimelineEffects effects;
  const std::lock_guard lock(timeline_mutex_);
  must(timeline_.flush(step, now_s(), effects));
  route(effects, true);
  if (timeline_.num_kept() > 0) inbox_->kick();  // the clock of early substeps may run now
}

SubstepVerdict Sender::Impl::start_substep(const Incarnation& scheduler, StepId step,
                                           SubstepId substep, std::vector<Send> sends) {
  must_be_open();
  std::vector<TimelinePart> parts;
  for (Send& send : sends) parts.push_back(part_of(std::move(send)));
  reserve(parts);
  TimelineEffects effects;
  const std::lock_guard lock(timeline_mutex_);
  const SubstepVerdict verdict =
      timeline_.start_substep(scheduler, step, substep, std::move(parts), now_s(), effects);
  route(effects, true);
  if (verdict == SubstepVerdict::kKept) inbox_->kick();  // it has a deadline
  return verdict;
}

void Sender::Impl::send_frozen(const Incarnation& scheduler, std::vector<Send> sends) {
  must_be_open();
  std::vector<TimelinePart> parts;
  for (Send& send : sends) parts.push_back(part_of(std::move(send)));
  reserve(parts);
  inbox_->push(
      [this, parts = std::move(parts), scheduler](SendLedger& ledger, LedgerEffects& out) {
        for (const TimelinePart& part : parts) {
          const std::size_t opened = ledger.attach(part.id, part.send, scheduler, now_s(), out);
          if (const std::size_t legs = num_legs(*part.send); legs > opened) {
            sink_->release(legs - opened);
          }
          for (const std::uint16_t layer : part.layers) ledger.layer_ready(part.id, layer, out);
          ledger.sealed(part.id, out);
        }
      },
      true);
}

void Sender::Impl::cancel(const TransferKey& key, Code code, const std::string& detail,
                          std::function<void()> if_none_open) {
  const Status why{code == Code::kOk ? Code::kAborted : code, detail};
  inbox_->push(
      [key, why, if_none_open = std::move(if_none_open)](SendLedger& ledger, LedgerEffects& out) {
        const bool was_open = ledger.cancel(key, why, now_s(), out);
        if (!was_open && if_none_open) if_none_open();
      },
      true);
}

void Sender::Impl::drop_peer(const Incarnation& worker_incarnation, const std::string& detail) {
  connections_->drop_peer(worker_incarnation, Code::kPeerLost, detail);
}

SenderSnapshot Sender::Impl::snapshot() const {
  SenderSnapshot s;
  {
    const std::lock_guard lock(ledger_mutex_);
    s.transfers = ledger_.view(now_s());
    s.counts = ledger_.counts();
  }
  const std::lock_guard lock(timeline_mutex_);
  s.scheduler = timeline_.scheduler();
  s.steps = timeline_.view();
  s.num_kept_substeps = timeline_.num_kept();
  s.num_refused = timeline_.num_refused();
  s.num_records = num_records_;
  s.num_event_waits = num_event_waits_.load(std::memory_order_relaxed);
  inbox_->kick();  // somebody may have found the ledger's lock taken and left something
  return s;
}

// --- from the timeline to the ledger and the waiter ---

void Sender::Impl::wake_waiter() {
  if (!std::exchange(waiter_sleeps_, false)) return;  // it looks by itself
  waits_changed_.notify_one();
}

void Sender::Impl::update_awaits() {
  const bool awaits = timeline_.awaits_record();
  const std::lock_guard lock(waits_mutex_);
  // Whoever sleeps deeply is woken when records begin to matter, not at the record.
  awaits_record_ = awaits;
  if (awaits) wake_waiter();
}

void Sender::Impl::route(TimelineEffects& effects, bool kick) {
  std::vector<TimelineEffect> rest;
  {
    const std::lock_guard lock(waits_mutex_);
    for (TimelineEffect& e : effects) {
      if (e.kind == TimelineEffect::Kind::kWait) {
        waits_.push_back({e.scheduler,
                          e.step,
                          e.layer,
                          e.generation,
                          {e.event_set, static_cast<std::uint32_t>(e.layer - layers_.first)}});
      } else {
        rest.push_back(std::move(e));
      }
    }
    if (!waits_.empty()) wake_waiter();
  }
  update_awaits();
  if (rest.empty()) return;
  inbox_->push(
      [this, rest = std::move(rest)](SendLedger& ledger, LedgerEffects& out) {
        for (const TimelineEffect& effect : rest) apply(effect, ledger, out);
      },
      kick);
}

void Sender::Impl::apply(const TimelineEffect& effect, SendLedger& ledger, LedgerEffects& out) {
  const auto settle = [&](std::size_t opened) {
    const std::size_t legs = num_legs(*effect.send);
    if (legs > opened) sink_->release(legs - opened);
  };
  switch (effect.kind) {
    case TimelineEffect::Kind::kAttach:
      settle(ledger.attach(effect.part, effect.send, effect.scheduler, now_s(), out));
      break;
    case TimelineEffect::Kind::kRefuse:
      settle(0);
      break;
    case TimelineEffect::Kind::kDispatch:
      ledger.layer_ready(effect.part, effect.layer, out);
      break;
    case TimelineEffect::Kind::kSealed:
      ledger.sealed(effect.part, out);
      break;
    case TimelineEffect::Kind::kFail:
      if (effect.send != nullptr) {
        settle(ledger.attach_failed(effect.send, effect.status, out));
      } else {
        ledger.fail_part(effect.part, effect.status, out);
      }
      break;
    case TimelineEffect::Kind::kWait:
      break;
  }
}

// --- the face ---

Sender::Sender(std::shared_ptr<const RankCache> cache, std::shared_ptr<CompletionSink> sink,
               std::shared_ptr<SendConnections> connections, SenderConfig config)
    : impl_(std::make_unique<Impl>(std::move(cache), std::move(sink), std::move(connections),
                                   std::move(config))) {}
Sender::~Sender() = default;

void Sender::begin_scheduler(const Incarnation& scheduler) {
  impl_->begin_scheduler(scheduler);
}
void Sender::end_scheduler(const Incarnation& scheduler) {
  impl_->end_scheduler(scheduler);
}
void Sender::submit_send(const Incarnation& scheduler, StepId step, Send send) {
  impl_->submit(scheduler, step, std::move(send));
}
void Sender::submit_delta(const Incarnation& scheduler, StepId step, const TransferKey& key,
                          BlockLists new_src_blocks, BlockLists new_dst_blocks,
                          std::uint32_t first_token, std::uint32_t end_token, bool last) {
  Send send;
  send.key = key;
  send.src_blocks = std::move(new_src_blocks);
  send.dst_blocks = std::move(new_dst_blocks);
  send.first_token = first_token;
  send.end_token = end_token;
  send.last = last;
  send.is_delta = true;
  impl_->submit(scheduler, step, std::move(send));
}
void Sender::start_step(const Incarnation& scheduler, StepId step, std::uint64_t sched_tokens,
                        std::uint32_t records_per_layer) {
  impl_->start_step(scheduler, step, sched_tokens, records_per_layer);
}
void Sender::record_event(StepId step, std::uint16_t layer, std::uintptr_t stream) {
  impl_->record_event(step, layer, stream);
}
SubstepId Sender::freeze_step(StepId step) {
  return impl_->freeze_step(step);
}
void Sender::flush_step(StepId step) {
  impl_->flush_step(step);
}
SubstepVerdict Sender::start_substep(const Incarnation& scheduler, StepId step, SubstepId substep,
                                     std::vector<Send> sends) {
  return impl_->start_substep(scheduler, step, substep, std::move(sends));
}
void Sender::send_frozen(const Incarnation& scheduler, std::vector<Send> sends) {
  impl_->send_frozen(scheduler, std::move(sends));
}
void Sender::cancel(const TransferKey& key, Code code, const std::string& detail,
                    std::function<void()> if_none_open) {
  impl_->cancel(key, code, detail, std::move(if_none_open));
}
void Sender::drop_peer(const Incarnation& worker_incarnation, const std::string& detail) {
  impl_->drop_peer(worker_incarnation, detail);
}
SenderSnapshot Sender::snapshot() const {
  return impl_->snapshot();
}
void Sender::close() {
  impl_->close();
}

}  // namespace kvt
