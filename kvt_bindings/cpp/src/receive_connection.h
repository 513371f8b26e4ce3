// The receiver's end of one data connection: its thread reads frames, checks descriptors against
// grants and has the transport place the bytes.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "coverage.h"
#include "fd.h"
#include "grants.h"
#include "kvt/data_protocol.h"
#include "kvt/memory.h"
#include "kvt/planner.h"
#include "kvt/receiver.h"
#include "transports/transport_type.h"

namespace kvt {

// What all connections of a receiver share; outlives them.
struct ReceiverShared {
  ReceiverShared(std::shared_ptr<const RankCache> cache_in, std::shared_ptr<CompletionSink> sink,
                 ReceiverConfig config_in)
      : cache(std::move(cache_in)),
        memory(registry_of(*cache)),
        config(std::move(config_in)),
        grants(cache->rank(), std::move(sink), &counters, config.max_marks),
        layout_bytes(cache->layout().serialize()) {}

  // Starts the progress clocks; the timer is woken only if it sleeps past the new deadline.
  void start_clocks(const GrantSpec& spec, std::span<const std::shared_ptr<SourceSlot>> slots) {
    const Clock::time_point now = Clock::now();
    for (const auto& slot : slots) slot->start_clock(now);
    const Clock::time_point end = now + std::chrono::milliseconds(spec.progress_timeout_ms);
    if (end.time_since_epoch().count() < next_look_ns.load()) timer.notify();
  }

  const std::shared_ptr<const RankCache> cache;
  const MemoryRegistry memory;
  const ReceiverConfig config;
  ReceiverCounters counters;
  GrantTable grants;
  PlannerCache planners;
  const std::vector<std::uint8_t> layout_bytes;
  WakeUp timer;  // a deadline comes earlier than expected, or a connection has ended
  std::atomic<Clock::rep> next_look_ns{Clock::time_point::max().time_since_epoch().count()};
};

class ReceiveConnection final : public SlotEndBox,
                                public std::enable_shared_from_this<ReceiveConnection> {
 public:
  ReceiveConnection(std::uint64_t id, Fd socket, SenderIdentity sender, ReceiverShared* shared);
  ~ReceiveConnection() override;

  void start();  // GO, handshake, frames: all on the thread
  void post(SlotEnd end) override;
  // Any thread: the thread ends soon; what was open fails with this code.
  void stop(Code code, const std::string& detail);
  bool is_over() const { return over_.load(std::memory_order_acquire); }
  void join();
  const SenderIdentity& sender() const { return sender_; }
  ReceiverSnapshot::Connection view() const;

 private:
  // One transfer that this connection carries.
  struct Carried {
    std::shared_ptr<Grant> grant;
    std::shared_ptr<SourceSlot> slot;
    bool crc = false;
    bool sender_ended = false;
    bool complete = false;             // all bytes landed; the sender is being asked (cma)
    std::optional<wire::Chunk> chunk;  // begun, not ended
    bool chunk_is_repeat = false;
    std::uint32_t chunk_crc = 0;
    DescriptorCheck check;
  };
  using CarriedMap = std::unordered_map<std::uint32_t, Carried>;

  // The current DESC frame's bytes.
  struct Incoming {
    std::uint32_t transfer = 0;
    std::uint16_t layer = 0;
    bool landing = false;  // false: to nowhere
  };

  enum class Progress { kMore, kWait, kStop };

  void run();
  void run_frames();
  Progress advance();
  Progress read_head();
  Progress read_body();
  Progress move_payload();
  Progress fill(std::uint8_t* to, std::size_t want);
  bool handle(std::uint32_t head);
  bool on_hello(wire::Body body);
  bool on_open(wire::Body body);
  bool on_blocks(wire::Body body);
  bool on_chunk_end(wire::Body body);
  bool on_end(wire::Body body);
  bool on_cancel(wire::Body body);
  bool on_held(wire::Body body);
  bool admit_blocks(Carried& carried, const wire::Blocks& frame);
  void end_of_payload();
  void completed(std::uint32_t transfer, Carried& carried);

  // Ends one transfer with a code; its DONE leaves through the letter box.
  void fail(Carried& carried, Code code, const std::string& detail);
  void violation(Carried& carried, const std::string& detail);
  void refuse_open(std::uint32_t transfer, Code code, const std::string& detail);
  // Ends the connection: the peer broke the protocol, or is gone. Returns false.
  bool give_up(Code code, const std::string& detail);
  void end_everything();
  Carried* find(std::uint32_t transfer);
  std::string peer_name() const;

  void collect_ended();
  bool flush_out();
  bool wait(int timeout_ms);

  const std::uint64_t id_;
  const Fd socket_;
  const SenderIdentity sender_;
  ReceiverShared* const shared_;
  WakeUp wake_;
  std::thread thread_;
  std::atomic<bool> over_{false};

  mutable std::mutex mutex_;  // of what follows, shared with other threads
  std::vector<SlotEnd> ended_;
  bool stop_ = false;
  Status stop_why_;
  ReceiverSnapshot::Connection view_;

  // The thread's own.
  Status end_;  // why the connection ends
  std::uint32_t source_rank_ = 0;
  std::shared_ptr<const PairPlanner> planner_;
  const TransportType* transport_ = nullptr;
  std::unique_ptr<Placer> placer_;
  CarriedMap carried_;
  std::uint32_t last_transfer_ = 0;
  std::array<std::uint8_t, wire::kFrameHeadBytes> head_{};
  std::size_t have_ = 0;
  wire::FrameHead frame_;
  std::vector<std::uint8_t> body_;
  std::uint64_t payload_left_ = 0;
  Incoming incoming_;
  enum class Phase { kHead, kBody, kPayload } phase_ = Phase::kHead;
  wire::Buffer out_;
  std::size_t out_sent_ = 0;
  std::atomic<std::uint64_t> placed_{0};
  std::atomic<std::uint64_t> drained_{0};
  std::atomic<std::size_t> num_open_{0};
};

}  // namespace kvt
