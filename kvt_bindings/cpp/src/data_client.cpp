#include "kvt/data_client.h"

#include <algorithm>
#include <mutex>

#include "send_connection.h"

namespace kvt {

class DataClient::Impl {
 public:
  Impl(std::shared_ptr<const RankCache> cache, std::function<void(DialRequest)> dial,
       DataClientConfig config)
      : shared_(std::move(cache), std::move(config)), dial_(std::move(dial)) {}

  ~Impl() { close(); }

  std::shared_ptr<SendConnection> get(const Peer& peer, std::shared_ptr<ConnectionEvents> events) {
    std::shared_ptr<SocketSendConnection> made;
    {
      const std::lock_guard held(mutex_);
      for (const auto& connection : connections_) {
        if (!connection->is_lost() && connection->peer() == peer) return connection;
      }
      made = std::make_shared<SocketSendConnection>(next_id_++, peer, std::move(events), &shared_);
      connections_.push_back(made);
      if (closed_) {
        made->close(Code::kAborted, "the client is closed");
        return made;
      }
    }
    dial_({made->id(), peer});
    return made;
  }

  void drop_peer(const Incarnation& worker_incarnation, Code code, const std::string& detail) {
    const std::lock_guard held(mutex_);
    for (const auto& connection : connections_) {
      if (connection->peer().worker_incarnation == worker_incarnation) {
        connection->close(code, detail);
      }
    }
  }

  Status adopt(std::uint64_t id, Fd socket) {
    bury();
    const auto connection = find(id);
    if (!connection) return {Code::kNotFound, "no such dial request"};
    return connection->adopt(std::move(socket));
  }

  void dial_failed(std::uint64_t id, Code code, const std::string& detail) {
    const auto connection = find(id);
    if (connection) connection->close(code == Code::kOk ? Code::kUnreachable : code, detail);
  }

  DataClientSnapshot snapshot() const {
    DataClientSnapshot out;
    const std::lock_guard held(mutex_);
    for (const auto& connection : connections_) out.connections.push_back(connection->view());
    return out;
  }

  void close() {
    std::vector<std::shared_ptr<SocketSendConnection>> all;
    {
      const std::lock_guard held(mutex_);
      closed_ = true;
      all = connections_;
    }
    for (const auto& connection : all) connection->close(Code::kAborted, "the client was closed");
    for (const auto& connection : all) connection->wait_until_over();
  }

 private:
  std::shared_ptr<SocketSendConnection> find(std::uint64_t id) const {
    const std::lock_guard held(mutex_);
    for (const auto& connection : connections_) {
      if (connection->id() == id) return connection;
    }
    return nullptr;
  }

  // Drops lost connections that nobody else holds; their threads end quickly.
  void bury() {
    std::vector<std::shared_ptr<SocketSendConnection>> dead;
    const std::lock_guard held(mutex_);
    const auto first_dead =
        std::partition(connections_.begin(), connections_.end(), [](const auto& connection) {
          return !connection->is_lost() || connection.use_count() > 1;
        });
    dead.assign(std::make_move_iterator(first_dead), std::make_move_iterator(connections_.end()));
    connections_.erase(first_dead, connections_.end());
  }

  const ClientShared shared_;
  const std::function<void(DialRequest)> dial_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  std::uint64_t next_id_ = 1;
  std::vector<std::shared_ptr<SocketSendConnection>> connections_;
};

DataClient::DataClient(std::shared_ptr<const RankCache> cache,
                       std::function<void(DialRequest)> dial, DataClientConfig config)
    : impl_(std::make_unique<Impl>(std::move(cache), std::move(dial), std::move(config))) {}
DataClient::~DataClient() = default;

std::shared_ptr<SendConnection> DataClient::get(const Peer& peer,
                                                std::shared_ptr<ConnectionEvents> events) {
  return impl_->get(peer, std::move(events));
}
void DataClient::drop_peer(const Incarnation& worker_incarnation, Code code,
                           const std::string& detail) {
  impl_->drop_peer(worker_incarnation, code, detail);
}
void DataClient::close() {
  impl_->close();
}
Status DataClient::adopt(std::uint64_t id, int fd) {
  return impl_->adopt(id, Fd(fd));
}
void DataClient::dial_failed(std::uint64_t id, Code code, const std::string& detail) {
  impl_->dial_failed(id, code, detail);
}
DataClientSnapshot DataClient::snapshot() const {
  return impl_->snapshot();
}

}  // namespace kvt
