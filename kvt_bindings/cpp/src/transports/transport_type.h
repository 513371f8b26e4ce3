// How bytes travel, behind one interface; each kind is a file of this folder and a row in
// transport_type.cpp. To add one: a TransportKind, a class here, a run of the conformance suite.
//
// The sender's half (Payload) hands the bytes of one DESC frame to the socket, or has none if the
// receiver fetches them. The receiver's half (Placer) moves the bytes of one checked frame to their
// place in steps that never wait for the peer.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvt/code.h"
#include "kvt/data_protocol.h"
#include "kvt/device_memory.h"
#include "kvt/memory.h"
#include "kvt/run.h"

namespace kvt {

// Bytes of one DESC frame on their way out. The connection's thread only.
class Payload {
 public:
  virtual ~Payload() = default;

  virtual std::uint64_t left() const = 0;
  // Appends iovecs for the next bytes, at most `max_iovecs`; at least one while left() > 0. May
  // block for a device copy, never for the peer.
  virtual Status gather(std::size_t max_iovecs, std::vector<iovec>* out) = 0;
  // The socket took `bytes` of what was gathered.
  virtual void advance(std::uint64_t bytes) = 0;
  // True if gather() always yields everything at once, so that frames behind it may follow in the
  // same call.
  virtual bool is_host() const = 0;
  // Asks for the CRC32C over all bytes, continued from `seed`; before the first gather().
  virtual void start_checksum(std::uint32_t seed) = 0;
  // Host memory: at once; device: when left() is 0.
  virtual std::uint32_t checksum() const = 0;
};

enum class StepKind : std::uint8_t {
  kMore,      // call again
  kWait,      // nothing to do until the socket is readable
  kDone,      // the frame is finished
  kPeerGone,  // end of file or reset
  kFailed,    // a local error
};

struct Step {
  StepKind kind = StepKind::kMore;
  std::uint64_t bytes = 0;  // moved by this call
  std::string detail;       // kPeerGone, kFailed
};

// Bytes of one checked DESC frame on their way in. The connection's thread, place() under the
// slot's lock. A placer serves all transfers of its connection, so settle(), which also whoever
// closes one of them calls, keeps a lock of its own against the rest.
class Placer {
 public:
  virtual ~Placer() = default;

  // Starts a frame. With `crc_seed` the checksum is continued over what is placed. BAD_REQUEST if a
  // range is outside either memory; then nothing was started.
  virtual Status begin(std::span<const IpcBlock> blocks, std::optional<std::uint32_t> crc_seed) = 0;
  // One bounded, non-blocking call's worth into the cache.
  virtual Step place() = 0;
  // Any thread. Everything placed so far is in cache memory when it returns OK.
  virtual Status settle() = 0;
  // True while settle() may have something to wait for.
  virtual bool is_asynchronous() const = 0;
  // Of the seed and what the last frame placed; after its kDone.
  virtual std::uint32_t crc() const = 0;
};

// What a connection gives a transport of its own side.
struct TransportContext {
  int socket = -1;  // stays the connection's
  const MemoryRegistry* memory = nullptr;
  DeviceMemory* device_memory = nullptr;  // may be null
};

struct PayloadRequest {
  const TransportContext& context;
  std::uint16_t layer;
  const Runs& runs;  // of which [first, first + count)
  std::size_t first;
  std::size_t count;
  DeviceReader* reader;  // the connection's, if the memory is on a device
};

class TransportType {
 public:
  virtual ~TransportType() = default;
  virtual wire::TransportKind kind() const = 0;

  // Sender: adds what the receiver needs to the greeting. False if it cannot be offered.
  virtual bool offer(const MemoryRegistry& memory, wire::Hello* hello) const = 0;
  // Receiver: tries it. nullptr, with the reason, if it does not work with this peer.
  virtual std::unique_ptr<Placer> accept(const wire::Hello& hello, const TransportContext& context,
                                         std::string* why) const = 0;
  // Sender: the bytes of runs[first, first + count) of `layer`, or nullptr if the receiver fetches
  // them itself. BAD_REQUEST for a run outside the layer.
  virtual Status payload(const PayloadRequest& request, std::unique_ptr<Payload>* out) const = 0;
  // The bytes follow their DESC frame on the socket.
  virtual bool carries_payload() const = 0;
  // The receiver reads the source itself: a transfer ends OK only after the sender, asked after the
  // last read, has said that the source was held.
  virtual bool confirms() const = 0;
};

// In no order of preference.
std::span<const TransportType* const> all_transports();
const TransportType& transport_type(wire::TransportKind kind);

const TransportType& tcp_transport();
const TransportType& cma_transport();

// iovecs of checked host spans, joining neighbours, and a cursor through them.
class IoCursor {
 public:
  void clear();
  void add(std::byte* data, std::uint64_t size);
  std::uint64_t left() const { return left_; }
  // The next iovecs, at most `max_iovecs` and at most `max_bytes` (0: no limit). Valid until the
  // next call of anything here.
  std::span<iovec> next(std::size_t max_iovecs, std::uint64_t max_bytes = 0);
  void advance(std::uint64_t bytes);
  // Over everything that was added.
  std::uint32_t checksum(std::uint32_t crc) const;
  // Over the first `bytes` of the last next().
  std::uint32_t checksum_window(std::uint64_t bytes, std::uint32_t crc) const;

 private:
  std::vector<iovec> all_;
  std::vector<iovec> window_;
  std::size_t at_ = 0;        // first iovec that is not finished
  std::uint64_t inside_ = 0;  // bytes of it that are
  std::uint64_t left_ = 0;
};

}  // namespace kvt
