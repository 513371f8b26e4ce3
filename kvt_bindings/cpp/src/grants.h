// Grants and the one lock that R4 rests on.
//
// A SourceSlot is what one source rank may still write. Its mutex is held by whoever places bytes,
// for one bounded call at a time, and by whoever ends it; so once end() has returned, nothing is
// being placed and nothing will be.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "coverage.h"
#include "kvt/receiver.h"

namespace kvt {

using Clock = std::chrono::steady_clock;

struct ReceiverCounters {
  std::atomic<std::uint64_t> bytes_placed{0};
  std::atomic<std::uint64_t> bytes_drained{0};
  std::atomic<std::uint64_t> completed{0};
  std::atomic<std::uint64_t> failed{0};
  std::atomic<std::uint64_t> violations{0};
  std::atomic<std::uint64_t> refused_opens{0};
  std::atomic<std::uint64_t> repeats{0};
  std::atomic<std::uint64_t> corrupt{0};
  std::atomic<std::uint64_t> marks_hit{0};
  std::atomic<std::uint64_t> connections{0};
};

// A source's end, told to the connection that carries it, so that it answers its sender.
struct SlotEnd {
  std::uint32_t transfer = 0;  // the handle there
  Code code = Code::kOk;
  std::uint32_t tokens = 0;
  std::string detail;
};

// A connection's letter box: any thread posts, the connection's thread reads.
class SlotEndBox {
 public:
  virtual ~SlotEndBox() = default;
  virtual void post(SlotEnd end) = 0;
};

class SourceSlot {
 public:
  enum class State : std::uint8_t { kWaiting, kReceiving, kConfirming, kEnded };

  SourceSlot(TransferKey key, std::uint32_t own_rank, std::uint32_t source_rank,
             std::shared_ptr<CompletionSink> sink, ReceiverCounters* counters)
      : key_(key),
        own_rank_(own_rank),
        source_rank_(source_rank),
        sink_(std::move(sink)),
        counters_(counters) {}

  // Ends the slot; only the first call counts, pushes the completion and tells the connection. When
  // any call has returned OK no byte can land any more; otherwise a device copy could not be seen
  // to its end.
  // `before_telling` runs in between, without the lock.
  Status end(Code code, std::uint32_t tokens, std::string detail,
             const std::function<void()>& before_telling = {});

  // A connection takes the slot. `expected` is the plan of the whole slice. False, with the reason,
  // if it is taken or ended.
  bool attach(std::weak_ptr<SlotEndBox> box, std::uint32_t transfer, Plan expected,
              std::uint32_t tokens, std::string* why);

  // Held while bytes are placed. `may_place()` is asked under it, before each call that writes.
  std::unique_lock<std::mutex> lock() const { return std::unique_lock(mutex_); }
  bool is_ending() const { return ending_.load(std::memory_order_acquire); }
  bool may_place() const { return !is_ending() && state_ == State::kReceiving; }

  // Under the lock. Set while device copies of this slot may be in flight; end() runs it before it
  // lets go.
  std::function<Status()> quiesce;

  // --- the attached connection's thread only, while may_place() or before ---
  const PlanPart* part_of(std::uint16_t layer) const { return expected_.find(layer); }
  LayerCoverage& coverage(std::uint16_t layer) { return coverage_[layer]; }
  void count_placed(std::uint64_t bytes);
  // A chunk is over: its pending bytes count. True when with it every expected byte has landed.
  bool commit(std::uint16_t layer);
  std::string describe_missing() const;
  std::uint32_t end_tokens() const { return tokens_; }
  void set_confirming();

  // --- any thread ---
  void start_clock(Clock::time_point now);
  // When this source times out, if its clock runs and it has not ended.
  bool deadline(std::chrono::milliseconds timeout, Clock::time_point* at) const;
  std::uint64_t bytes_placed() const { return bytes_placed_.load(std::memory_order_relaxed); }
  ReceiverSnapshot::Source view(Clock::time_point now) const;
  std::uint32_t source_rank() const { return source_rank_; }
  bool ended() const { return ended_.load(std::memory_order_acquire); }

 private:
  const TransferKey key_;
  const std::uint32_t own_rank_;
  const std::uint32_t source_rank_;
  const std::shared_ptr<CompletionSink> sink_;
  ReceiverCounters* const counters_;

  mutable std::mutex mutex_;
  std::atomic<bool> ending_{false};  // set before end() asks for the lock: the placer lets it in
  std::atomic<bool> ended_{false};   // state_ == kEnded, readable without the lock
  State state_ = State::kWaiting;
  Code code_ = Code::kOk;
  std::string detail_;
  Status quiet_;  // whether the device copies were seen to their end
  std::weak_ptr<SlotEndBox> box_;
  std::uint32_t transfer_ = 0;
  std::uint32_t tokens_ = 0;

  Plan expected_;
  std::unordered_map<std::uint16_t, LayerCoverage> coverage_;
  std::uint64_t committed_bytes_ = 0;
  std::atomic<std::uint64_t> bytes_expected_{0};
  std::atomic<std::uint64_t> bytes_placed_{0};
  std::atomic<std::int64_t> last_progress_ns_{-1};  // of Clock; -1: the clock does not run
};

struct Grant {
  GrantSpec spec;
  std::vector<std::shared_ptr<SourceSlot>> slots;  // as spec.source_ranks

  SourceSlot* slot_of(std::uint32_t source_rank) const;
  bool all_ended() const;
};

// Open grants and marks of closed ones. Any thread.
class GrantTable {
 public:
  GrantTable(std::uint32_t own_rank, std::shared_ptr<CompletionSink> sink,
             ReceiverCounters* counters, std::size_t max_marks);

  // The spec has been checked against the layout.
  Status open(GrantSpec spec);
  Status close(const TransferKey& key, Code code, const std::string& detail);
  void end_scheduler(const Incarnation& scheduler_incarnation);
  void close_all(Code code, const std::string& detail);  // and takes no more
  std::shared_ptr<Grant> find(const TransferKey& key) const;
  // Whether this key was here and is over (or was closed in advance).
  bool is_marked(const TransferKey& key) const;
  // Ends one source; with the last one the grant turns into a mark.
  Status finish(const Grant& grant, SourceSlot& slot, Code code, std::uint32_t tokens,
                std::string detail);
  // Ends what timed out; the next moment to look, or Clock::time_point::max().
  Clock::time_point expire(Clock::time_point now);
  void snapshot(ReceiverSnapshot* out) const;

 private:
  void mark(const TransferKey& key);  // with mutex_
  Status end_all(const Grant& grant, Code code, const std::string& detail);

  const std::uint32_t own_rank_;
  const std::shared_ptr<CompletionSink> sink_;
  ReceiverCounters* const counters_;
  const std::size_t max_marks_;

  mutable std::mutex mutex_;  // never held while a slot's lock is awaited
  bool closed_ = false;
  std::unordered_map<TransferKey, std::shared_ptr<Grant>> grants_;
  std::unordered_set<TransferKey> marks_;
  std::deque<TransferKey> marks_order_;
  std::deque<Incarnation> ended_schedulers_;
};

}  // namespace kvt
