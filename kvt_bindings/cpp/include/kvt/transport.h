// Between the sender engine and a data connection: what is sent, and what comes back.
//
// One connection joins one sender rank to one receiver rank and has one native thread. Every call
// here only puts an entry into the connection's queue: it takes no lock that is held over a system
// call, never waits for the peer, and never calls back from inside. So a slow receiver delays its
// own connection and no other. How the bytes travel (tcp, cma, later nixl or CUDA IPC) is agreed
// when the connection is made and invisible here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvt/code.h"
#include "kvt/ids.h"
#include "kvt/ipc_block.h"
#include "kvt/run.h"

namespace kvt {

// Stands for a TransferKey on one connection; given out by the sender, counted from 1, never used
// twice on a connection.
using TransferHandle = std::uint32_t;

struct TransferOpen {
  TransferKey key;
  // Of the scheduler (not the worker) that ordered the send: the receiver's grant names it.
  Incarnation sender_incarnation;
  // The tokens that this rank will send in all, [first_token, end_token) of the request; both 0 if
  // that is not known yet: then the receiver's grant alone says when the transfer is complete.
  std::uint32_t first_token = 0;
  std::uint32_t end_token = 0;
  // A CRC32C travels with each chunk: of what the sender's memory held, against what was placed.
  bool crc = false;
};

// One layer's bytes for one token range: a chunk. The chunks of a transfer may come in any order;
// each (layer, token) is sent once.
struct LayerSend {
  std::uint16_t layer = 0;  // global layer number
  std::uint32_t first_token = 0;
  std::uint32_t end_token = 0;
  SharedRuns runs;  // as the planner gave them, in its order; kept until the chunk was sent
};

// What a connection says about one transfer. Called on the connection's thread, which must not be
// held up: implementations push into a queue. For every opened transfer each of the two is called
// exactly once, on_source_released first.
class TransferEvents {
 public:
  virtual ~TransferEvents() = default;

  // From now on nothing reads this transfer's source blocks on behalf of a transfer that can still
  // succeed: all bytes were handed over (tcp) or the receiver has read them and was told that the
  // source was held (cma), or the transfer was given up.
  virtual void on_source_released(TransferHandle transfer) = 0;

  // The end. OK: the receiver has placed `tokens` (= end_token of the range) and said so. Anything
  // else names the peer and, where there is one, the layer in `detail`.
  virtual void on_result(TransferHandle transfer, Code code, std::uint32_t tokens,
                         const std::string& detail) = 0;
};

class SendConnection;

// What happens to a connection as a whole; same thread and rules as TransferEvents.
class ConnectionEvents {
 public:
  virtual ~ConnectionEvents() = default;

  // Handshake done: peer_layout() may be read and layers may be sent.
  virtual void on_ready(SendConnection& connection) = 0;

  // The connection ended, also before it was ready. Every transfer opened on it has had its
  // on_result before this call. Nothing follows.
  virtual void on_lost(SendConnection& connection, Code code, const std::string& detail) = 0;
};

class SendConnection {
 public:
  virtual ~SendConnection() = default;

  // --- any thread; none of these blocks ---

  // Allowed before the connection is ready; on one that is lost the transfer ends at once with the
  // connection's code (through `events`, on the connection's thread, as always).
  virtual TransferHandle open(const TransferOpen& transfer,
                              std::shared_ptr<TransferEvents> events) = 0;

  // The layer's bytes are final (its event has completed). Only after on_ready, since the runs
  // depend on the peer's layout. A handle that has ended is ignored: its on_result is under way.
  virtual void send_layer(TransferHandle transfer, LayerSend layer) = 0;

  // No more chunks will come. The receiver answers with the result once it has everything.
  virtual void end(TransferHandle transfer) = 0;

  // Give the transfer up with this code; on_source_released and on_result follow without waiting
  // for the peer. What is half way through the socket is finished with filler bytes, not from the
  // source blocks, and the receiver never counts them.
  virtual void cancel(TransferHandle transfer, Code code, std::string detail) = 0;

  // End the connection; its open transfers end with this code, then on_lost.
  virtual void close(Code code, std::string detail) = 0;

  // --- after on_ready, from any thread ---

  // The receiving rank's cache layout as it sent it (layout.h decodes it). It stays valid as long
  // as the connection object.
  virtual const std::vector<std::uint8_t>& peer_layout() const = 0;
  // "tcp", "cma": what was agreed.
  virtual std::string_view transport() const = 0;
};

// Whom a connection leads to. Two sends to the same Peer share a connection.
struct Peer {
  std::string instance;
  Incarnation scheduler_incarnation;
  Incarnation worker_incarnation;
  std::int32_t rank = 0;
  std::string address;  // of the worker's server, "tcp://host:port" or "unix:///path"

  bool operator==(const Peer&) const = default;
};

// Gives out connections and makes them on demand. The socket is opened and authenticated by the
// dialer that was set (Python, over simple_rpc), which later calls adopt() or dial_failed().
class SendConnections {
 public:
  virtual ~SendConnections() = default;

  // Any thread, never blocks. The existing connection to `peer`, or a new one whose dial has just
  // been asked for and whose connect deadline runs. A lost connection is replaced. `events` is used
  // only when the connection is new.
  virtual std::shared_ptr<SendConnection> get(const Peer& peer,
                                              std::shared_ptr<ConnectionEvents> events) = 0;

  // Any thread: end every connection to this worker incarnation.
  virtual void drop_peer(const Incarnation& worker_incarnation, Code code,
                         const std::string& detail) = 0;

  // Ends everything with ABORTED and joins the threads.
  virtual void close() = 0;
};

}  // namespace kvt
