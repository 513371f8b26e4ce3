#include "kvt/receiver.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <set>
#include <thread>

#include "grants.h"
#include "receive_connection.h"

namespace kvt {

class Receiver::Impl {
 public:
  Impl(std::shared_ptr<const RankCache> cache, std::shared_ptr<CompletionSink> sink,
       ReceiverConfig config)
      : shared_(std::move(cache), std::move(sink), std::move(config)),
        own_planner_(shared_.cache->shared_layout(), shared_.cache->shared_layout()),
        timer_([this] { run_timer(); }) {}

  ~Impl() { close(); }

  Status adopt(Fd socket, const SenderIdentity& sender) {
    const int flags = fcntl(socket.get(), F_GETFL);
    if (flags < 0) return {Code::kBadRequest, "not a descriptor"};
    fcntl(socket.get(), F_SETFD, FD_CLOEXEC);
    const int on = 1;  // fails on Unix sockets, where it is not needed
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    const std::lock_guard held(mutex_);
    if (closed_) return {Code::kAborted, "the receiver is closed"};
    if (connections_.size() >= shared_.config.max_connections) {
      return {Code::kBusy, "too many data connections"};
    }
    auto connection = std::make_shared<ReceiveConnection>(shared_.counters.connections.fetch_add(1),
                                                          std::move(socket), sender, &shared_);
    connection->start();
    connections_.push_back(std::move(connection));
    return {};
  }

  Status open_grant(GrantSpec spec) {
    if (spec.first_token >= spec.end_token) {
      return {Code::kBadRequest, "token range [" + std::to_string(spec.first_token) + ", " +
                                     std::to_string(spec.end_token) + ") is empty"};
    }
    const std::set<std::uint32_t> ranks(spec.source_ranks.begin(), spec.source_ranks.end());
    if (ranks.empty() || ranks.size() != spec.source_ranks.size() || *ranks.rbegin() >= kMaxRanks) {
      return {Code::kBadRequest, "source ranks are empty, repeated or out of range"};
    }
    if (spec.progress_timeout_ms == 0) return {Code::kBadRequest, "progress timeout of 0 ms"};
    try {  // as if from a sender with this very layout: are the block lists good for these tokens?
      (void)own_planner_.expected(shared_.cache->rank(), shared_.cache->rank(), spec.block_ids,
                                  {spec.first_token, spec.end_token});
    } catch (const Error& e) {
      return {e.code(), e.what()};
    }
    return shared_.grants.open(std::move(spec));
  }

  Status close_grant(const TransferKey& key, Code code, const std::string& detail) {
    return shared_.grants.close(key, code, detail);
  }

  Status start_progress(const TransferKey& key) {
    const std::shared_ptr<Grant> grant = shared_.grants.find(key);
    if (grant == nullptr) return {Code::kNotFound, "transfer " + key.hex() + " is not open"};
    shared_.start_clocks(grant->spec, grant->slots);
    return {};
  }

  void end_scheduler(const Incarnation& incarnation) { shared_.grants.end_scheduler(incarnation); }

  void drop_peer(const Incarnation& incarnation) {
    const std::lock_guard held(mutex_);
    for (const auto& connection : connections_) {
      if (incarnation.is_zero() || connection->sender().worker_incarnation == incarnation) {
        connection->stop(Code::kPeerLost, "the sender's worker was given up");
      }
    }
  }

  ReceiverSnapshot snapshot() const {
    ReceiverSnapshot out;
    shared_.grants.snapshot(&out);
    {
      const std::lock_guard held(mutex_);
      for (const auto& connection : connections_) {
        if (!connection->is_over()) out.connections.push_back(connection->view());
      }
    }
    const ReceiverCounters& c = shared_.counters;
    out.bytes_placed = c.bytes_placed.load();
    out.bytes_drained = c.bytes_drained.load();
    out.num_completed = c.completed.load();
    out.num_failed = c.failed.load();
    out.num_violations = c.violations.load();
    out.num_refused_opens = c.refused_opens.load();
    out.num_repeats = c.repeats.load();
    out.num_corrupt = c.corrupt.load();
    out.num_marks_hit = c.marks_hit.load();
    out.num_connections_total = c.connections.load();
    return out;
  }

  void close() {
    {
      const std::lock_guard held(mutex_);
      if (closed_) return;
      closed_ = true;
    }
    shared_.grants.close_all(Code::kAborted, "the receiver was closed");
    std::vector<std::shared_ptr<ReceiveConnection>> all;
    {
      const std::lock_guard held(mutex_);
      all.swap(connections_);
    }
    for (const auto& connection : all) {
      connection->stop(Code::kAborted, "the receiver was closed");
    }
    for (const auto& connection : all) connection->join();
    timer_stop_.store(true);
    shared_.timer.notify();
    timer_.join();
  }

 private:
  static constexpr std::uint32_t kMaxRanks = 1u << 22;  // above any tp x pp

  // Sleeps until the next progress deadline, a started clock or an ended connection.
  void run_timer() {
    Clock::time_point next = Clock::time_point::max();
    while (!timer_stop_.load()) {
      int timeout_ms = -1;
      if (next != Clock::time_point::max()) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
        timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
      }
      shared_.next_look_ns.store(next.time_since_epoch().count());
      pollfd wake{shared_.timer.fd(), POLLIN, 0};
      if (!shared_.timer.is_pending() && poll(&wake, 1, timeout_ms) > 0) shared_.timer.drain();
      shared_.timer.acknowledge();
      // A clock that starts while expire() looks must wake us: it may not have been seen.
      shared_.next_look_ns.store(Clock::time_point::max().time_since_epoch().count());
      next = shared_.grants.expire(Clock::now());
      reap();
    }
  }

  void reap() {
    std::vector<std::shared_ptr<ReceiveConnection>> over;
    {
      const std::lock_guard held(mutex_);
      const auto first_over =
          std::partition(connections_.begin(), connections_.end(),
                         [](const auto& connection) { return !connection->is_over(); });
      over.assign(first_over, connections_.end());
      connections_.erase(first_over, connections_.end());
    }
    for (const auto& connection : over) connection->join();
  }

  ReceiverShared shared_;
  const PairPlanner own_planner_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  std::vector<std::shared_ptr<ReceiveConnection>> connections_;
  std::atomic<bool> timer_stop_{false};
  std::thread timer_;
};

Receiver::Receiver(std::shared_ptr<const RankCache> cache, std::shared_ptr<CompletionSink> sink,
                   ReceiverConfig config)
    : impl_(std::make_unique<Impl>(std::move(cache), std::move(sink), std::move(config))) {}
Receiver::~Receiver() = default;

Status Receiver::adopt(int fd, const SenderIdentity& sender) {
  return impl_->adopt(Fd(fd), sender);
}
Status Receiver::open_grant(GrantSpec spec) {
  return impl_->open_grant(std::move(spec));
}
Status Receiver::close_grant(const TransferKey& key, Code code, const std::string& detail) {
  return impl_->close_grant(key, code, detail);
}
Status Receiver::start_progress(const TransferKey& key) {
  return impl_->start_progress(key);
}
void Receiver::end_scheduler(const Incarnation& incarnation) {
  impl_->end_scheduler(incarnation);
}
void Receiver::drop_peer(const Incarnation& incarnation) {
  impl_->drop_peer(incarnation);
}
ReceiverSnapshot Receiver::snapshot() const {
  return impl_->snapshot();
}
void Receiver::close() {
  impl_->close();
}

}  // namespace kvt
