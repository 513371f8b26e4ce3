// The sender's own threads: waiting for events, applying the inbox, planning, closing.
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "sender_impl.h"

namespace kvt {
namespace {

using Kind = LedgerEffect::Kind;

// While an open step owes a layer that a send needs, the waiting thread looks for its record by
// itself, after naps of a fraction of the time since the last one: a wake-up by futex would cost
// the engine's thread several microseconds a layer, the nap costs the layer's bytes about 12% of
// the time that the layer took.
constexpr auto kShortestNap = std::chrono::microseconds(20);
constexpr auto kLongestNap = std::chrono::microseconds(500);
constexpr int kNapFraction = 8;
constexpr unsigned long kTimerSlackNs = 5000;  // the default of 50 us would double short naps

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

}  // namespace

RankLayers::RankLayers(const RankCache& cache) {
  const Layout& layout = cache.layout();
  for (const LayerEntry& entry : layout.layers) {
    if (entry.stage != layout.pp_rank(cache.rank())) continue;
    all.push_back(entry.layer);
    const auto& views = layout.pattern_of(entry).views;
    const bool is_state_only = std::all_of(views.begin(), views.end(), [](const View& v) {
      return v.granularity == Granularity::kState;
    });
    if (!is_state_only) tokens.push_back(entry.layer);
  }
  if (all.empty()) return;
  first = all.front();
  count = static_cast<std::uint16_t>(all.back() - all.front() + 1);
}

// Connections speak through these to the inbox, on their threads; they may outlive the sender.
class Sender::Impl::Listener final : public ConnectionEvents {
 public:
  explicit Listener(Impl* sender) : sender_(sender), inbox_(sender->inbox_) {}

  void on_ready(SendConnection& connection) override {
    inbox_->push(
        [sender = sender_, socket = &connection](SendLedger& ledger, LedgerEffects& out) {
          const auto it = sender->sockets_.find(socket);
          if (it == sender->sockets_.end()) return;
          it->second.is_ready = true;
          ledger.connection_ready(it->second.id, out);
        },
        true);
  }
  void on_lost(SendConnection& connection, Code code, const std::string& detail) override {
    inbox_->push(
        [sender = sender_, socket = &connection, code, detail](SendLedger& ledger,
                                                               LedgerEffects& out) {
          const auto it = sender->sockets_.find(socket);
          if (it == sender->sockets_.end()) return;
          ledger.connection_lost(it->second.id, {code, detail}, out);
          sender->sockets_.erase(it);
        },
        true);
  }

 private:
  Impl* const sender_;  // used only by inputs, which only the sender applies
  const std::shared_ptr<SenderInbox> inbox_;
};

class Sender::Impl::LegListener final : public TransferEvents {
 public:
  LegListener(LegId leg, std::shared_ptr<SenderInbox> inbox)
      : leg_(leg), inbox_(std::move(inbox)) {}

  void on_source_released(TransferHandle) override {}  // on_result follows and means it, too
  void on_result(TransferHandle, Code code, std::uint32_t tokens,
                 const std::string& detail) override {
    inbox_->push(
        [leg = leg_, code, tokens, detail](SendLedger& ledger, LedgerEffects& out) {
          ledger.result(leg, {code, detail}, tokens, out);
        },
        true);
  }

 private:
  const LegId leg_;
  const std::shared_ptr<SenderInbox> inbox_;
};

Sender::Impl::Impl(std::shared_ptr<const RankCache> cache, std::shared_ptr<CompletionSink> sink,
                   std::shared_ptr<SendConnections> connections, SenderConfig config)
    : cache_(std::move(cache)),
      sink_(std::move(sink)),
      connections_(std::move(connections)),
      config_(std::move(config)),
      layers_(*cache_),
      timeline_(layers_.first, layers_.count, config_.timeline),
      ledger_(cache_->rank(), config_.crc, config_.ledger) {
  const auto num_sets = static_cast<std::uint32_t>(config_.timeline.max_open_steps);
  events_ = cache_->cuda_device().has_value()
                ? make_cuda_events(num_sets, layers_.count, *cache_->cuda_device(),
                                   config_.event_wait, config_.cuda_library)
                : make_host_events(num_sets, layers_.count);
  listener_ = std::make_shared<Listener>(this);
  sending_ = std::thread([this] { run_sending(); });
  waiting_ = std::thread([this] { run_waiting(); });
}

// --- applying the inbox ---

void Sender::Impl::pump() {
  // Whoever holds the lock looks again after giving it up, so nothing is left lying.
  while (!inbox_->empty()) {
    const std::unique_lock lock(ledger_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    LedgerEffects effects;
    for (const SenderInbox::Input& input : inbox_->take()) {
      effects.clear();
      input(ledger_, effects);
      execute(effects);
    }
  }
}

void Sender::Impl::execute(LedgerEffects& effects) {
  std::vector<PartId> forgotten;
  for (std::size_t i = 0; i < effects.size(); ++i) {  // connect() adds to them
    const LedgerEffect effect = std::move(effects[i]);
    const auto leg = legs_.find(effect.leg);
    switch (effect.kind) {
      case Kind::kConnect:
        connect(effect, effects);
        break;
      case Kind::kPlan:
        plan_tasks_.push_back({effect.leg, effect.part, effect.job, leg->second.socket});
        inbox_->kick();
        break;
      case Kind::kOpen:
        leg->second.handle = leg->second.socket->open(
            effect.open, std::make_shared<LegListener>(effect.leg, inbox_));
        break;
      case Kind::kSend:
        leg->second.stamps_ns[1] = now_ns();
        if (leg->second.stamps_ns[3] == 0) leg->second.stamps_ns[3] = leg->second.stamps_ns[1];
        leg->second.socket->send_layer(leg->second.handle, effect.layer);
        break;
      case Kind::kEnd:
        leg->second.stamps_ns[2] = now_ns();
        leg->second.socket->end(leg->second.handle);
        break;
      case Kind::kCancel:
        leg->second.socket->cancel(leg->second.handle, effect.status.code, effect.status.detail);
        break;
      case Kind::kComplete: {
        Completion completion = effect.completion;
        if (leg != legs_.end()) {
          completion.stamps_ns = leg->second.stamps_ns;
          legs_.erase(leg);
        }
        sink_->push(std::move(completion));
        break;
      }
      case Kind::kForget:
        forgotten.push_back(effect.part);
        break;
    }
  }
  if (forgotten.empty()) return;
  TimelineEffects none;
  const std::lock_guard lock(timeline_mutex_);
  timeline_.drop(forgotten, none);
  update_awaits();
}

void Sender::Impl::connect(const LedgerEffect& effect, LedgerEffects& more) {
  const std::shared_ptr<SendConnection> socket = connections_->get(effect.peer, listener_);
  auto [it, is_new] = sockets_.try_emplace(socket.get());
  Connection& connection = it->second;
  if (is_new) {
    connection.id = next_connection_++;
    connection.socket = socket;
  }
  LegIo& leg = legs_[effect.leg];
  leg.socket = socket;
  leg.stamps_ns[0] = now_ns();
  ledger_.connected(effect.leg, connection.id, connection.is_ready, more);
}

// --- the sending thread ---

void Sender::Impl::run_sending() {
  while (!stop_sending_.load(std::memory_order_acquire)) {
    {
      TimelineEffects expired;
      const std::lock_guard lock(timeline_mutex_);
      timeline_.expire(now_s(), expired);
      route(expired, false);
    }
    pump();
    if (run_plans()) continue;
    double next = -1;
    {
      const std::lock_guard lock(ledger_mutex_);
      LedgerEffects effects;
      ledger_.tick(now_s(), effects);
      execute(effects);
      next = ledger_.next_deadline_s();
    }
    pump();  // what came while this thread held the lock
    {
      const std::lock_guard lock(timeline_mutex_);
      const double early = timeline_.next_deadline_s();
      if (early >= 0 && (next < 0 || early < next)) next = early;
    }
    inbox_->wait(next < 0 ? -1 : std::max(0.0, next - now_s()));
  }
}

bool Sender::Impl::run_plans() {
  std::vector<PlanTask> tasks;
  {
    const std::lock_guard lock(ledger_mutex_);
    tasks.swap(plan_tasks_);
  }
  for (const PlanTask& task : tasks) {
    SharedPlan plan;
    const Status status = make_plan(task, &plan);
    inbox_->push(
        [leg = task.leg, part = task.part, plan, status](SendLedger& ledger, LedgerEffects& out) {
          ledger.planned(leg, part, plan, status, out);
        },
        false);
    pump();
  }
  return !tasks.empty();
}

Status Sender::Impl::make_plan(const PlanTask& task, SharedPlan* out) {
  try {
    auto& planner = pair_planners_[task.socket.get()];
    if (planner.socket.lock() != task.socket) {
      planner = {task.socket,
                 planners_.get(cache_->shared_layout(), Layout::parse(task.socket->peer_layout()))};
      std::erase_if(pair_planners_, [](const auto& e) { return e.second.socket.expired(); });
    }
    const auto& pair = pair_planners_.at(task.socket.get()).planner;
    *out = std::make_shared<const Plan>(
        pair->plan(cache_->rank(), static_cast<std::uint32_t>(task.job.target_rank),
                   *task.job.src_blocks, *task.job.dst_blocks, task.job.tokens, task.job.last));
    return {};
  } catch (const Error& e) {
    return {e.code(), e.what()};
  } catch (const std::exception& e) {
    return {Code::kInternal, std::string("planning: ") + e.what()};
  }
}

// --- the waiting thread ---

void Sender::Impl::run_waiting() {
  (void)prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  Wait wait;
  while (next_wait(&wait)) {
    const Status status = events_->wait(wait.event);
    num_event_waits_.fetch_add(1, std::memory_order_relaxed);
    {
      TimelineEffects effects;
      const std::lock_guard lock(timeline_mutex_);
      timeline_.event_done(wait.scheduler, wait.step, wait.layer, wait.generation, status, effects);
      route(effects, false);
    }
    pump();
  }
}

bool Sender::Impl::next_wait(Wait* out) {
  const auto asleep_since = std::chrono::steady_clock::now();
  std::unique_lock lock(waits_mutex_);
  while (waits_.empty()) {
    if (stop_waiting_) return false;
    if (awaits_record_) {
      const auto idle = std::chrono::steady_clock::now() - asleep_since;
      const auto nap =
          std::clamp<std::chrono::nanoseconds>(idle / kNapFraction, kShortestNap, kLongestNap);
      waits_changed_.wait_for(lock, nap);
    } else {
      waiter_sleeps_ = true;
      waits_changed_.wait(lock);
      waiter_sleeps_ = false;  // also if nobody meant to
    }
  }
  *out = waits_.front();
  waits_.pop_front();
  return true;
}

// --- the end ---

void Sender::Impl::close() {
  const std::lock_guard only_one(close_mutex_);
  if (closed_) return;
  closed_ = true;
  closing_.store(true);
  const Status aborted{Code::kAborted, "the sender was closed"};
  {
    TimelineEffects effects;
    const std::lock_guard lock(timeline_mutex_);
    timeline_.end_scheduler(effects);
    route(effects, false);
  }
  inbox_->push(
      [aborted](SendLedger& ledger, LedgerEffects& out) { ledger.cancel_all(aborted, out); }, true);
  pump();
  connections_->close();  // every opened leg has its result in the inbox after this
  events_->interrupt();
  {
    const std::lock_guard lock(waits_mutex_);
    stop_waiting_ = true;
    waits_.clear();
  }
  waits_changed_.notify_all();
  stop_sending_.store(true, std::memory_order_release);
  inbox_->kick();
  waiting_.join();
  sending_.join();
  // What calls that were under way at the same time have left.
  inbox_->push(
      [this, aborted](SendLedger& ledger, LedgerEffects& out) {
        ledger.cancel_all(aborted, out);
        for (const auto& [socket, connection] : sockets_) {
          ledger.connection_lost(connection.id, aborted, out);
        }
      },
      false);
  pump();
  sockets_.clear();
}

}  // namespace kvt
