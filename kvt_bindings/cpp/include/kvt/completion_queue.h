// Completions from native threads to an asyncio loop of the same process: a bounded queue with
// reserved slots and one wake-up descriptor.
//
// Contract. reserve()/release(): any thread, when a transfer opens / ends without a completion.
// push(): any native thread, without the GIL; never blocks and never fails while within its
// reservation. drain(): one consumer; returns in batches, in push order, and re-arms the wake-up.
// The descriptor becomes readable at the first push after a drain that emptied the queue, once, so
// a burst is one wake-up. After close() push() is ignored (counted) and drain() returns what is
// left.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "kvt/code.h"
#include "kvt/ids.h"

namespace kvt {

// One rank's word on its part of one transfer.
struct Completion {
  enum class Kind : std::uint8_t { kSendDone = 0, kLoadDone = 1 };
  Kind kind = Kind::kSendDone;
  TransferKey key;
  std::uint32_t rank = 0;        // own rank
  std::uint32_t other_rank = 0;  // the peer's rank of this slice
  std::uint64_t tokens = 0;      // end of the contiguous range done, from the first wanted token
  Code code = Code::kOk;
  std::string detail;  // for a human; empty when OK
  // A send's life at this rank, on CLOCK_MONOTONIC, for traces: bound to its step, last layer
  // ready, handed to its connection whole; and, last, when its first layer was handed over. 0: it
  // did not get there.
  std::array<std::uint64_t, 4> stamps_ns{};
};

// Where completions go: into this process (CompletionQueue) or to the scheduler (NewsChannel).
// Both calls: any native thread, never blocking.
class CompletionSink {
 public:
  virtual ~CompletionSink() = default;
  // When a transfer opens. False, with nothing reserved, if room for `n` cannot be promised: the
  // transfer is then refused with BUSY.
  [[nodiscard]] virtual bool reserve(std::size_t n) = 0;
  // Gives back slots whose transfers will not be reported after all. A sink without a bound need
  // not do anything.
  virtual void release(std::size_t n) { (void)n; }
  // Uses up one reserved slot.
  virtual void push(Completion completion) = 0;
};

class CompletionQueue : public CompletionSink {
 public:
  // `max_reserved`: how many completions may be owed at once.
  explicit CompletionQueue(std::size_t max_reserved = 1 << 16);
  ~CompletionQueue() override;
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  [[nodiscard]] bool reserve(std::size_t n) override;
  void release(std::size_t n) override;
  void push(Completion completion) override;

  // An eventfd, owned by the queue, for loop.add_reader().
  int wake_fd() const { return wake_fd_; }

  // At most `max_items`; if some are left the descriptor stays readable.
  std::vector<Completion> drain(std::size_t max_items = 4096);

  void close();

  struct Stats {
    std::uint64_t reserved = 0;  // owed now: reserved and not yet drained
    std::uint64_t queued = 0;
    std::uint64_t pushed = 0;
    std::uint64_t wakeups = 0;
    std::uint64_t dropped_after_close = 0;
    std::uint64_t pushed_unreserved = 0;  // a bug of the producer; still delivered
  };
  Stats stats() const;

 private:
  const std::size_t max_reserved_;
  int wake_fd_ = -1;
  mutable std::mutex mutex_;
  std::deque<Completion> items_;
  std::size_t reserved_ = 0;
  bool armed_ = false;  // the descriptor is readable
  bool closed_ = false;
  Stats stats_;
};

}  // namespace kvt
