// The sender's transfers: which parts they have, what of them went out, and how each ended. Pure:
// no clock, no thread, no socket; the caller serialises the calls, gives the time, executes the
// returned effects in order and reports what became of them.
//
// A *transfer* (one key) has a *leg* for each receiver rank and consists of *parts* (sends of
// steps, substeps, or frozen). Rules kept here, whatever the order of calls:
//  * Each leg that was attached ends in exactly one kComplete: OK only on the receiver's own word.
//  * What fails one part fails every leg of its transfer; what fails one leg leaves the others.
//  * A leg that was opened on a connection ends when the connection says so, hence only when nobody
//    reads its source blocks; one that was not opened ends at once.
//  * A part goes out once: ranges that are there already are dropped and counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvt/code.h"
#include "kvt/completion_queue.h"
#include "kvt/ids.h"
#include "kvt/planner.h"
#include "kvt/run.h"
#include "kvt/sends.h"
#include "kvt/step_timeline.h"
#include "kvt/transport.h"

namespace kvt {

using LegId = std::uint64_t;
using ConnectionId = std::uint64_t;
using SharedPlan = std::shared_ptr<const Plan>;

struct LedgerLimits {
  double whole_s = 120;  // from a transfer's first part to its end
  double mark_s = 120;   // how long a cancel that came first is remembered
  std::size_t max_marks = 65536;
  std::size_t max_ended = 65536;  // ended transfers whose late parts are recognised
};

struct LedgerEffect {
  enum class Kind : std::uint8_t {
    kConnect,   // find or make the connection to `peer`; then connected() for `leg`
    kPlan,      // plan `job`; then planned() for (`leg`, `part`)
    kOpen,      // open `open` on the leg's connection
    kSend,      // send_layer(`layer`)
    kEnd,       // end()
    kCancel,    // cancel() with `status`
    kComplete,  // push `completion`
    kForget,    // `part` is of no more use to the timeline
  };
  struct PlanJob {
    std::int32_t target_rank = 0;
    std::shared_ptr<const BlockLists> src_blocks;
    std::shared_ptr<const BlockLists> dst_blocks;
    TokenRange tokens;
    bool last = false;
  };
  Kind kind;
  LegId leg = 0;
  PartId part = 0;
  Peer peer{};
  PlanJob job{};
  TransferOpen open{};
  LayerSend layer{};
  Status status{};
  Completion completion{};
};
using LedgerEffects = std::vector<LedgerEffect>;

// One transfer that has not ended, for people.
struct TransferView {
  struct Leg {
    std::int32_t target_rank = 0;
    std::string state;  // connecting, planning, sending, confirming, cancelling
    std::size_t num_layers_sent = 0;
  };
  TransferKey key;
  std::string target_instance;
  std::uint32_t first_token = 0;
  std::uint32_t end_token = 0;  // of the parts so far
  bool last_seen = false;
  double age_s = 0;
  std::size_t num_parts_waiting = 0;  // for layers of their step
  std::vector<Leg> legs;
};

struct LedgerCounts {
  std::uint64_t num_attached = 0;     // parts
  std::uint64_t num_repeated = 0;     // parts that were there already
  std::uint64_t num_late = 0;         // parts of transfers that had ended
  std::uint64_t num_unknown = 0;      // deltas of transfers that nobody opened
  std::uint64_t num_marks_hit = 0;    // transfers whose cancel came first
  std::uint64_t num_completed = 0;    // legs that ended OK
  std::uint64_t num_failed = 0;       // legs that ended otherwise
  std::uint64_t num_legs_opened = 0;  // ever
};

class SendLedger {
 public:
  SendLedger(std::uint32_t rank, bool crc, LedgerLimits limits = {})
      : rank_(rank), crc_(crc), limits_(limits) {}

  // A part is in. The number of legs it opened (0: it joined, or was dropped); each owes one
  // completion.
  std::size_t attach(PartId part, const SharedSend& send, const Incarnation& scheduler,
                     double now_s, LedgerEffects& out);
  // A send that failed before it was in: as attach() and fail_part(), without a connection.
  std::size_t attach_failed(const SharedSend& send, const Status& why, LedgerEffects& out);
  // What the timeline says of an attached part; unknown ones are ignored (their transfer ended).
  void layer_ready(PartId part, std::uint16_t layer, LedgerEffects& out);
  void sealed(PartId part, LedgerEffects& out);
  void fail_part(PartId part, const Status& why, LedgerEffects& out);

  // What became of kConnect: the connection that the leg is on from now.
  void connected(LegId leg, ConnectionId connection, bool is_ready, LedgerEffects& out);
  void connection_ready(ConnectionId connection, LedgerEffects& out);
  // All its opened legs have had their result.
  void connection_lost(ConnectionId connection, const Status& why, LedgerEffects& out);
  // What became of kPlan; a failing status fails the leg.
  void planned(LegId leg, PartId part, SharedPlan plan, const Status& status, LedgerEffects& out);
  // What the connection says of an opened leg.
  void result(LegId leg, const Status& status, std::uint32_t tokens, LedgerEffects& out);

  // Gives up a transfer. If none is open (false): marks its key, so that it ends at once if it
  // comes.
  bool cancel(const TransferKey& key, const Status& why, double now_s, LedgerEffects& out);
  void cancel_all(const Status& why, LedgerEffects& out);
  // Transfers that have passed their deadline fail with TIMEOUT.
  void tick(double now_s, LedgerEffects& out);
  double next_deadline_s();  // or a negative number

  std::vector<TransferView> view(double now_s) const;
  const LedgerCounts& counts() const { return counts_; }
  std::size_t num_legs() const { return legs_.size(); }

 private:
  struct Part {
    TransferKey key;
    TokenRange tokens;
    bool last = false;
    bool sealed = false;
    std::shared_ptr<const BlockLists> src_blocks;
    std::shared_ptr<const BlockLists> dst_blocks;
    std::vector<std::uint16_t> ready;  // layers that are final, in the order they became so
  };
  enum class LegState : std::uint8_t { kConnecting, kReady, kOpen, kEnding, kCancelling };
  struct LegPart {
    SharedPlan plan;              // null: not planned yet
    bool is_asked = false;        // kPlan was given
    std::size_t num_handled = 0;  // of Part::ready: sent, or found to have no bytes here
  };
  struct Leg {
    TransferKey key;
    SendTarget target;
    LegState state = LegState::kConnecting;
    ConnectionId connection = 0;  // 0: none yet
    std::map<PartId, LegPart> parts;
    std::size_t num_layers_sent = 0;
    Status failed;  // why it is being given up
  };
  struct Transfer {
    Incarnation scheduler;
    std::string target_instance;
    Incarnation target_incarnation;
    std::shared_ptr<const BlockLists> src_blocks;
    std::shared_ptr<const BlockLists> dst_blocks;
    std::uint32_t end_of_all = 0;  // 0: not known
    bool last_seen = false;
    double started_s = 0;
    std::vector<PartId> parts;
    std::vector<LegId> legs;  // that have not ended
  };

  void plan_parts(LegId id, Leg& leg, LedgerEffects& out);
  void send_ready(LegId id, Leg& leg, PartId part, LedgerEffects& out);
  void settle(LegId id, LedgerEffects& out);  // ends or completes the leg if all has gone
  void fail_transfer(const TransferKey& key, const Status& why, LedgerEffects& out);
  void fail_leg(LegId id, const Status& why, LedgerEffects& out);
  void complete(LegId id, const Status& status, std::uint32_t tokens, LedgerEffects& out);
  Completion completion_of(const TransferKey& key, std::int32_t target_rank, const Status& status,
                           std::uint64_t tokens);
  void remember_end(const TransferKey& key);
  std::size_t end_unopened(const Send& send, const Status& why, LedgerEffects& out);
  // True if every token of the transfer is in some part, from the first one to the last part's end.
  bool is_whole(const Transfer& transfer) const;
  TokenRange range_of(const Transfer& transfer) const;
  std::size_t num_unsealed(const Transfer& transfer) const;

  const std::uint32_t rank_;
  const bool crc_;
  const LedgerLimits limits_;
  LegId next_leg_ = 1;
  std::unordered_map<TransferKey, Transfer> transfers_;
  std::unordered_map<PartId, Part> parts_;
  std::unordered_map<LegId, Leg> legs_;
  std::deque<std::pair<double, TransferKey>> by_age_;  // start, in order; ended ones linger
  struct Mark {
    Status why;
    double until_s = 0;
  };
  std::unordered_map<TransferKey, Mark> marks_;
  std::deque<TransferKey> mark_order_;
  std::unordered_map<TransferKey, bool> ended_;
  std::deque<TransferKey> ended_order_;
  LedgerCounts counts_;
};

}  // namespace kvt
