// The sender rank's data connections: dialled on demand, one thread each (transport.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvt/code.h"
#include "kvt/data_protocol.h"
#include "kvt/device_memory.h"
#include "kvt/rank_cache.h"
#include "kvt/transport.h"

namespace kvt {

struct DataClientConfig {
  // Transports to offer; the receiver chooses. One alone forces it.
  std::vector<wire::TransportKind> transports = {wire::TransportKind::kCma,
                                                 wire::TransportKind::kTcp};
  std::uint32_t connect_timeout_ms = 3'000;     // to dial and authenticate; again for the greeting
  std::uint32_t progress_timeout_ms = 30'000;   // the peer takes no byte and answers nothing
  std::shared_ptr<DeviceMemory> device_memory;  // needed if the cache is on a device
};

// Please connect to `peer`, authenticate, make the DATA call, read GO, then adopt(id, fd).
struct DialRequest {
  std::uint64_t id = 0;
  Peer peer;
};

struct DataClientSnapshot {
  struct Connection {
    std::uint64_t id = 0;
    Peer peer;
    std::string state;             // dialling, greeting, ready, lost
    std::string transport;         // once ready
    std::string note;              // why not the better transport; why it was lost
    std::uint64_t bytes_sent = 0;  // payload
    std::size_t num_open = 0;
  };
  std::vector<Connection> connections;
};

class DataClient final : public SendConnections {
 public:
  // `dial` is called from whatever thread calls get() and only passes the request on. The cache's
  // memory stays alive until close() has returned.
  DataClient(std::shared_ptr<const RankCache> cache, std::function<void(DialRequest)> dial,
             DataClientConfig config = {});
  ~DataClient() override;

  std::shared_ptr<SendConnection> get(const Peer& peer,
                                      std::shared_ptr<ConnectionEvents> events) override;
  void drop_peer(const Incarnation& worker_incarnation, Code code,
                 const std::string& detail) override;
  void close() override;

  // Answers to a DialRequest, once, from any thread. adopt() takes the socket also if the request
  // is over by now (then it is closed and NOT_FOUND returned).
  Status adopt(std::uint64_t id, int fd);
  void dial_failed(std::uint64_t id, Code code, const std::string& detail);

  DataClientSnapshot snapshot() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvt
