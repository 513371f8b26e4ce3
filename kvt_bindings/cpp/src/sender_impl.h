// Inside the sender. Locks, in the order in which they may be taken together:
//   ledger_mutex_ → timeline_mutex_ → inbox_mutex_ / waits_mutex_ (leaves).
// Calls of the engine take the timeline's lock for a moment and leave what follows in the inbox.
// Whoever has put something there and may spend the time runs pump(): one thread at a time applies
// the inbox to the ledger, in order, and does what the ledger says. No call made from pump()
// blocks. Planning, which takes longer, is done by the sending thread outside every lock.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "kvt/planner.h"
#include "kvt/sender.h"

namespace kvt {

// What other threads leave for the ledger. Outlives the sender: connections may still speak.
class SenderInbox {
 public:
  using Input = std::function<void(SendLedger&, LedgerEffects&)>;

  void push(Input input, bool wake) {
    {
      const std::lock_guard lock(mutex_);
      inputs_.push_back(std::move(input));
      kicked_ = kicked_ || wake;
    }
    if (wake) changed_.notify_one();
  }
  void kick() {
    {
      const std::lock_guard lock(mutex_);
      kicked_ = true;
    }
    changed_.notify_one();
  }
  std::vector<Input> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(inputs_, {});
  }
  bool empty() const {
    const std::lock_guard lock(mutex_);
    return inputs_.empty();
  }
  // Until kicked, or the time has come (negative: only kicked).
  void wait(double seconds) {
    std::unique_lock lock(mutex_);
    const auto kicked = [this] { return kicked_; };
    if (seconds < 0) {
      changed_.wait(lock, kicked);
    } else {
      changed_.wait_for(lock, std::chrono::duration<double>(seconds), kicked);
    }
    kicked_ = false;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Input> inputs_;
  bool kicked_ = false;
};

// The layers of one rank's pipeline stage, ascending.
struct RankLayers {
  explicit RankLayers(const RankCache& cache);
  std::uint16_t first = 0;
  std::uint16_t count = 0;  // from `first` to the last one
  std::vector<std::uint16_t> all;
  std::vector<std::uint16_t> tokens;  // without those that hold only state of whole requests
};

class Sender::Impl {
 public:
  Impl(std::shared_ptr<const RankCache> cache, std::shared_ptr<CompletionSink> sink,
       std::shared_ptr<SendConnections> connections, SenderConfig config);
  ~Impl() { close(); }

  void begin_scheduler(const Incarnation& scheduler);
  void end_scheduler(const Incarnation& scheduler);
  void submit(const Incarnation& scheduler, StepId step, Send send);
  void start_step(const Incarnation& scheduler, StepId step, std::uint64_t sched_tokens,
                  std::uint32_t records_per_layer);
  void record_event(StepId step, std::uint16_t layer, std::uintptr_t stream);
  SubstepId freeze_step(StepId step);
  void flush_step(StepId step);
  SubstepVerdict start_substep(const Incarnation& scheduler, StepId step, SubstepId substep,
                               std::vector<Send> sends);
  void send_frozen(const Incarnation& scheduler, std::vector<Send> sends);
  void cancel(const TransferKey& key, Code code, const std::string& detail,
              std::function<void()> if_none_open);
  void drop_peer(const Incarnation& worker_incarnation, const std::string& detail);
  SenderSnapshot snapshot() const;
  void close();

 private:
  struct Wait {
    Incarnation scheduler;
    StepId step = 0;
    std::uint16_t layer = 0;
    std::uint32_t generation = 0;
    EventId event;
  };
  struct Connection {
    ConnectionId id = 0;
    std::shared_ptr<SendConnection> socket;
    bool is_ready = false;
  };
  struct LegIo {
    std::shared_ptr<SendConnection> socket;
    TransferHandle handle = 0;                 // 0: not opened
    std::array<std::uint64_t, 4> stamps_ns{};  // see Completion
  };
  struct PlanTask {
    LegId leg = 0;
    PartId part = 0;
    LedgerEffect::PlanJob job;
    std::shared_ptr<SendConnection> socket;
  };
  struct PeerPlanner {
    std::weak_ptr<SendConnection> socket;
    std::shared_ptr<const PairPlanner> planner;
  };
  class Listener;     // of connections
  class LegListener;  // of one opened leg

  TimelinePart part_of(Send send);
  // BUSY unless completions of all legs that these parts may open are promised.
  void reserve(const std::vector<TimelinePart>& parts);
  void must_be_open() const;
  // Hands on what the timeline decided; the caller holds its lock. `kick`: the sending thread is to
  // go on with it (otherwise the caller pumps).
  void route(TimelineEffects& effects, bool kick);
  void apply(const TimelineEffect& effect, SendLedger& ledger, LedgerEffects& out);
  void update_awaits();
  void wake_waiter();  // the caller holds waits_mutex_

  void pump();
  void execute(LedgerEffects& effects);
  void connect(const LedgerEffect& effect, LedgerEffects& more);
  bool run_plans();  // false: there was nothing to plan
  Status make_plan(const PlanTask& task, SharedPlan* out);

  void run_sending();
  void run_waiting();
  bool next_wait(Wait* out);

  const std::shared_ptr<const RankCache> cache_;
  const std::shared_ptr<CompletionSink> sink_;
  const std::shared_ptr<SendConnections> connections_;
  const SenderConfig config_;
  const RankLayers layers_;
  std::unique_ptr<Events> events_;
  const std::shared_ptr<SenderInbox> inbox_ = std::make_shared<SenderInbox>();
  std::shared_ptr<Listener> listener_;
  std::atomic<PartId> next_part_{1};
  std::atomic<bool> closing_{false};
  std::atomic<std::uint64_t> num_event_waits_{0};

  mutable std::mutex timeline_mutex_;
  StepTimeline timeline_;
  TimelineEffects scratch_;
  std::uint32_t num_prepared_sets_ = 0;
  std::uint64_t num_records_ = 0;

  mutable std::mutex ledger_mutex_;
  SendLedger ledger_;
  std::unordered_map<LegId, LegIo> legs_;
  std::unordered_map<SendConnection*, Connection> sockets_;
  ConnectionId next_connection_ = 1;
  std::vector<PlanTask> plan_tasks_;

  std::mutex waits_mutex_;
  std::condition_variable waits_changed_;
  std::deque<Wait> waits_;
  bool awaits_record_ = false;  // an open step owes a needed layer: records are looked for
  bool waiter_sleeps_ = false;  // deeply: it has to be woken
  bool stop_waiting_ = false;

  // The sending thread's own.
  PlannerCache planners_;
  std::unordered_map<SendConnection*, PeerPlanner> pair_planners_;
  std::atomic<bool> stop_sending_{false};

  std::mutex close_mutex_;
  bool closed_ = false;
  std::thread sending_;
  std::thread waiting_;
};

}  // namespace kvt
