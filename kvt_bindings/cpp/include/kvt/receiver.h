// The receiver of one rank: the only code that writes KV into this rank's cache.
//
// Bytes land only while a *grant* is open: one transfer, one named sender, these blocks, these
// tokens, from these source ranks. A grant ends per source rank, each with exactly one Completion:
// OK when every byte of that rank's slice has landed, or a code. After close_grant returns, or
// after a completion was pushed, no byte of that transfer (from that source) can land any more,
// whatever the sender does.
//
// Threads: one per data connection, one for deadlines; none takes the GIL. All public calls are
// safe from any thread. Those that change grants wait at most for one non-blocking system call (or
// the device copies) of each source that is being placed at that moment.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvt/code.h"
#include "kvt/completion_queue.h"
#include "kvt/data_protocol.h"
#include "kvt/device_memory.h"
#include "kvt/ids.h"
#include "kvt/planner.h"
#include "kvt/rank_cache.h"

namespace kvt {

struct GrantSpec {
  TransferKey key;
  Incarnation scheduler_incarnation;  // who opens it; its end closes it
  std::string sender_instance;        // who may use it
  Incarnation sender_incarnation;     // of the sender's scheduler
  BlockLists block_ids;               // from token 0, per group of the receiver's layout
  std::uint32_t first_token = 0;
  std::uint32_t end_token = 0;
  std::vector<std::uint32_t> source_ranks;     // each owes one completion
  std::uint32_t progress_timeout_ms = 10'000;  // once started and no byte placed for so long
};

// The other end of a data connection, as the embedder authenticated it (HELLO).
struct SenderIdentity {
  std::string instance;
  Incarnation worker_incarnation;
  std::string address;  // for people
};

struct ReceiverConfig {
  // Transports to accept, in order of preference. One alone forces it.
  std::vector<wire::TransportKind> transports = {wire::TransportKind::kCma,
                                                 wire::TransportKind::kTcp};
  std::uint32_t handshake_timeout_ms = 3'000;
  std::size_t max_connections = 4096;
  std::size_t max_open_per_connection = 65'536;  // transfers at once
  std::size_t max_marks = 65'536;                // closed transfers remembered
  std::shared_ptr<DeviceMemory> device_memory;   // needed if the cache is on a device
};

// Counters since the start, and what is open now; for people and tests.
struct ReceiverSnapshot {
  struct Source {
    std::uint32_t rank = 0;
    std::string state;  // waiting, receiving, confirming, ended
    Code code = Code::kOk;
    std::string detail;
    std::uint64_t bytes_placed = 0;
    std::uint64_t bytes_expected = 0;  // 0 until its sender has opened the transfer
    double idle_s = -1;                // since the last byte or the start; -1: not started
  };
  struct GrantView {
    TransferKey key;
    std::string sender_instance;
    std::uint32_t first_token = 0;
    std::uint32_t end_token = 0;
    std::uint64_t num_blocks = 0;
    std::uint32_t progress_timeout_ms = 0;
    std::vector<Source> sources;
  };
  struct Connection {
    std::uint64_t id = 0;
    SenderIdentity sender;
    std::uint32_t source_rank = 0;
    std::string transport;  // empty during the handshake
    std::string note;       // why not the better transport
    std::uint64_t bytes_placed = 0;
    std::uint64_t bytes_drained = 0;
    std::size_t num_open = 0;
  };
  std::vector<GrantView> grants;
  std::vector<Connection> connections;
  std::size_t num_marks = 0;
  std::uint64_t bytes_placed = 0;
  std::uint64_t bytes_drained = 0;      // arrived for closed or repeated ranges: to nowhere
  std::uint64_t num_completed = 0;      // source slices that ended OK
  std::uint64_t num_failed = 0;         // ... with another code
  std::uint64_t num_violations = 0;     // descriptors or frames that broke the rules
  std::uint64_t num_refused_opens = 0;  // OPEN without a matching grant
  std::uint64_t num_repeats = 0;        // frames whose range had been accepted before
  std::uint64_t num_corrupt = 0;        // checksum mismatches
  std::uint64_t num_marks_hit = 0;      // opens not taken because the close came first
  std::uint64_t num_connections_total = 0;
};

class Receiver : public std::enable_shared_from_this<Receiver> {
 public:
  // The cache's memory stays alive until close() has returned. `sink` outlives the receiver.
  Receiver(std::shared_ptr<const RankCache> cache, std::shared_ptr<CompletionSink> sink,
           ReceiverConfig config = {});
  ~Receiver();
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  // Takes the socket (closes it also on failure), writes GO and starts the handshake on a thread of
  // its own. BUSY if there are too many connections, ABORTED if closed.
  Status adopt(int fd, const SenderIdentity& sender);

  // OK: open. BAD_REQUEST: blocks, tokens or ranks that do not fit this cache, or the key is open
  // already. ABORTED: it was closed before it came, or its scheduler incarnation has ended. BUSY:
  // no room for its completions. Unless OK nothing is owed.
  Status open_grant(GrantSpec spec);

  // When it returns no byte of the transfer can land any more. Sources that still owed a completion
  // owe it now with `code`. Always OK: an unknown key is marked, so that an open that comes later
  // is not taken.
  Status close_grant(const TransferKey& key, Code code = Code::kAborted,
                     const std::string& detail = "closed by the scheduler");

  // The sender says that it has begun (STARTED): the progress clock of every source runs from now.
  // It also starts by itself when a source opens the transfer. NOT_FOUND if it is not open.
  Status start_progress(const TransferKey& key);

  // Closes every grant of this scheduler incarnation and takes no more from it.
  void end_scheduler(const Incarnation& scheduler_incarnation);

  // Ends connections of this worker incarnation (all if zero); what they carried fails PEER_LOST.
  void drop_peer(const Incarnation& worker_incarnation);

  ReceiverSnapshot snapshot() const;

  // Closes all grants (ABORTED) and connections, joins the threads. Idempotent.
  void close();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvt
