// The sender of one rank: along the engine's steps, or at once, and never waiting for a byte.
//
// Threads. The engine's own thread: submit_send, submit_delta, start_step, record_event,
// freeze_step, flush_step, for one step at a time in that order (steps may overlap). Any thread,
// and concurrently: start_substep, send_frozen, cancel, drop_peer, begin_scheduler, snapshot. None
// of them waits for bytes, peers or the device. Two native threads of its own: one waits for layer
// events in the order in which they were recorded, one plans, connects, keeps the deadlines and
// completes. Bytes leave on the connections' threads. Nobody here takes the GIL.
//
// Each (transfer, receiver rank) that a taken send opened ends in exactly one Completion, after
// which this process neither reads its source blocks nor confirms their lease to the receiver.
// Sends of a refused substep have no completion: the answer of freeze_step is their end.
//
// Calls throw Error: BAD_REQUEST for what the caller got wrong, GONE for a scheduler incarnation
// that has ended, BUSY for lack of room, ABORTED after close(). A call that throws has changed
// nothing, unless it says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvt/completion_queue.h"
#include "kvt/events.h"
#include "kvt/ids.h"
#include "kvt/rank_cache.h"
#include "kvt/send_ledger.h"
#include "kvt/sends.h"
#include "kvt/step_timeline.h"
#include "kvt/transport.h"

namespace kvt {

struct SenderConfig {
  TimelineLimits timeline;
  LedgerLimits ledger;
  bool crc = false;                          // CRC32C with every chunk
  EventWait event_wait = EventWait::kBlock;  // for a cache on a CUDA device
  std::string cuda_library;                  // empty: see CudaDriver::open
};

struct SenderSnapshot {
  Incarnation scheduler;
  std::vector<StepView> steps;
  std::vector<TransferView> transfers;
  std::size_t num_kept_substeps = 0;
  std::uint64_t num_refused = 0;  // sends of refused substeps
  LedgerCounts counts;
  std::uint64_t num_records = 0;
  std::uint64_t num_event_waits = 0;
};

class Sender {
 public:
  // The cache's memory stays alive until close() has returned. Events are CUDA's if the cache is on
  // a device (throws Error if the driver cannot be had), the host's otherwise.
  Sender(std::shared_ptr<const RankCache> cache, std::shared_ptr<CompletionSink> sink,
         std::shared_ptr<SendConnections> connections, SenderConfig config = {});
  ~Sender();  // close()
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  // The scheduler that speaks from now on; everything of the one before it ends (ABORTED), and it
  // never comes back. Also implied by start_step with a new incarnation.
  void begin_scheduler(const Incarnation& scheduler);
  // That scheduler is gone. Nothing happens if it is not the current one.
  void end_scheduler(const Incarnation& scheduler);

  // Before start_step of that step. submit_delta continues a transfer: tokens [first, end) and the
  // block ids that are new since its last send.
  void submit_send(const Incarnation& scheduler, StepId step, Send send);
  void submit_delta(const Incarnation& scheduler, StepId step, const TransferKey& key,
                    BlockLists new_src_blocks, BlockLists new_dst_blocks, std::uint32_t first_token,
                    std::uint32_t end_token, bool last);

  // Steps ascend. `records_per_layer`: how often each layer is recorded in this step
  // (microbatches); a layer recorded less often is final when the step is flushed.
  void start_step(const Incarnation& scheduler, StepId step, std::uint64_t sched_tokens,
                  std::uint32_t records_per_layer = 1);
  // After the layer's attention was put on `stream` (events.h says what that number is). Makes no
  // system call besides the driver's.
  void record_event(StepId step, std::uint16_t layer, std::uintptr_t stream);
  // The answer is final: every substep up to it is in, every other one is out.
  SubstepId freeze_step(StepId step);
  // No more records. Sends that need a layer which was not recorded fail.
  void flush_step(StepId step);

  SubstepVerdict start_substep(const Incarnation& scheduler, StepId step, SubstepId substep,
                               std::vector<Send> sends);
  // Complete KV: at once, outside any step.
  void send_frozen(const Incarnation& scheduler, std::vector<Send> sends);

  // Gives a transfer up; its open legs complete with `code`. If none is open, the key is marked, so
  // that a send of it that comes later ends at once, and `if_none_open` is called (on one of the
  // sender's threads or a caller's; it must not block or call the sender).
  void cancel(const TransferKey& key, Code code = Code::kAborted,
              const std::string& detail = "cancelled by the scheduler",
              std::function<void()> if_none_open = {});
  // A receiver's worker is gone: its connections end, what they carried completes with PEER_LOST.
  void drop_peer(const Incarnation& worker_incarnation, const std::string& detail);

  SenderSnapshot snapshot() const;

  // Everything that is open completes with ABORTED; joins the threads and closes the connections.
  // Waits for the device if it is in the middle of EventWait::kBlock. Idempotent.
  void close();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvt
