// The sender rank's data connections: the dial queue that Python serves, and a connection driven by
// hand (for tests and measurements; the sender engine drives them in production).
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "data_options.h"
#include "kvt/data_client.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvt_python {
namespace {

void check(const kvt::Status& status) {
  if (!status.ok()) throw kvt::Error(status.code, status.detail);
}

// Dial requests from native threads, with a descriptor for the loop.
class DialQueue {
 public:
  DialQueue() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0) throw kvt::Error(kvt::Code::kInternal, "eventfd failed");
  }
  ~DialQueue() { ::close(fd_); }
  DialQueue(const DialQueue&) = delete;
  DialQueue& operator=(const DialQueue&) = delete;

  void push(kvt::DialRequest request) {
    const std::lock_guard held(mutex_);
    requests_.push_back(std::move(request));
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = write(fd_, &one, sizeof one);
  }
  std::vector<kvt::DialRequest> take() {
    const std::lock_guard held(mutex_);
    std::uint64_t count = 0;
    [[maybe_unused]] const auto n = read(fd_, &count, sizeof count);
    return std::exchange(requests_, {});
  }
  int fd() const { return fd_; }

 private:
  const int fd_;
  std::mutex mutex_;
  std::vector<kvt::DialRequest> requests_;
};

// What Python holds: the client and its dial queue, which live and die together.
class PythonDataClient final : public kvt::SendConnections {
 public:
  PythonDataClient(std::shared_ptr<const kvt::RankCache> cache, kvt::DataClientConfig config)
      : client_(
            std::move(cache), [this](kvt::DialRequest request) { dials_.push(std::move(request)); },
            std::move(config)) {}

  std::shared_ptr<kvt::SendConnection> get(const kvt::Peer& peer,
                                           std::shared_ptr<kvt::ConnectionEvents> events) override {
    return client_.get(peer, std::move(events));
  }
  void drop_peer(const kvt::Incarnation& worker_incarnation, kvt::Code code,
                 const std::string& detail) override {
    client_.drop_peer(worker_incarnation, code, detail);
  }
  void close() override { client_.close(); }

  DialQueue dials_;
  kvt::DataClient client_;
};

// A connection whose events are waited for.
class HandConnection {
 public:
  struct Events final : kvt::TransferEvents, kvt::ConnectionEvents {
    void on_source_released(kvt::TransferHandle t) override {
      const std::lock_guard held(mutex);
      released[t] = true;
      changed.notify_all();
    }
    void on_result(kvt::TransferHandle t, kvt::Code code, std::uint32_t tokens,
                   const std::string& detail) override {
      const std::lock_guard held(mutex);
      results[t] = {code, tokens, detail};
      changed.notify_all();
    }
    void on_ready(kvt::SendConnection&) override {
      const std::lock_guard held(mutex);
      ready = true;
      changed.notify_all();
    }
    void on_lost(kvt::SendConnection&, kvt::Code code, const std::string& detail) override {
      const std::lock_guard held(mutex);
      lost = true;
      why = {code, detail};
      changed.notify_all();
    }

    struct Result {
      kvt::Code code;
      std::uint32_t tokens;
      std::string detail;
    };
    std::mutex mutex;
    std::condition_variable changed;
    bool ready = false;
    bool lost = false;
    kvt::Status why;
    std::map<kvt::TransferHandle, bool> released;
    std::map<kvt::TransferHandle, Result> results;
  };

  HandConnection(std::shared_ptr<PythonDataClient> client, const kvt::Peer& peer)
      : client_(std::move(client)),
        events_(std::make_shared<Events>()),
        connection_(client_->get(peer, events_)) {}

  template <class Condition>
  bool wait(double timeout_s, Condition condition) {
    const nb::gil_scoped_release released;
    std::unique_lock held(events_->mutex);
    return events_->changed.wait_for(held, std::chrono::duration<double>(timeout_s), condition);
  }

  kvt::SendConnection& connection() { return *connection_; }
  Events& events() { return *events_; }
  const std::shared_ptr<Events>& shared_events() { return events_; }

 private:
  std::shared_ptr<PythonDataClient> client_;
  std::shared_ptr<Events> events_;
  std::shared_ptr<kvt::SendConnection> connection_;
};

kvt::Peer peer_of(std::string instance, const nb::bytes& scheduler_incarnation,
                  const nb::bytes& worker_incarnation, std::int32_t rank, std::string address) {
  return {std::move(instance),
          id_from<kvt::Incarnation>(scheduler_incarnation, "scheduler_incarnation"),
          id_from<kvt::Incarnation>(worker_incarnation, "worker_incarnation"), rank,
          std::move(address)};
}

nb::dict connection_dict(const kvt::DataClientSnapshot::Connection& c) {
  nb::dict d;
  d["id"] = c.id;
  d["instance"] = c.peer.instance;
  d["worker_incarnation"] = id_bytes(c.peer.worker_incarnation);
  d["rank"] = c.peer.rank;
  d["address"] = c.peer.address;
  d["state"] = c.state;
  d["transport"] = c.transport;
  d["note"] = c.note;
  d["bytes_sent"] = c.bytes_sent;
  d["num_open"] = c.num_open;
  return d;
}

void bind_hand_connection(nb::module_& m) {
  nb::class_<HandConnection>(m, "DataConnection",
                             "A data connection driven by hand: for tests and measurements.")
      .def(nb::init<std::shared_ptr<PythonDataClient>, const kvt::Peer&>(), "client"_a, "peer"_a)
      .def(
          "wait_ready",
          [](HandConnection& c, double timeout_s) {
            auto& e = c.events();
            if (!c.wait(timeout_s, [&] { return e.ready || e.lost; })) return false;
            if (e.lost) throw kvt::Error(e.why.code, e.why.detail);
            return true;
          },
          "timeout_s"_a, "False after the timeout; raises KvtError if the connection was lost.")
      .def(
          "wait_lost",
          [](HandConnection& c, double timeout_s) -> nb::object {
            auto& e = c.events();
            if (!c.wait(timeout_s, [&] { return e.lost; })) return nb::none();
            return nb::make_tuple(static_cast<int>(e.why.code), e.why.detail);
          },
          "timeout_s"_a, nb::sig("def wait_lost(self, timeout_s: float) -> tuple[int, str] | None"),
          "(code, detail), or None after the timeout.")
      .def(
          "open",
          [](HandConnection& c, const nb::bytes& key, const nb::bytes& sender_incarnation,
             std::uint32_t first_token, std::uint32_t end_token, bool crc) {
            kvt::TransferOpen open;
            open.key = id_from<kvt::TransferKey>(key, "key");
            open.sender_incarnation =
                id_from<kvt::Incarnation>(sender_incarnation, "sender_incarnation");
            open.first_token = first_token;
            open.end_token = end_token;
            open.crc = crc;
            return c.connection().open(open, c.shared_events());
          },
          "key"_a, nb::kw_only(), "sender_incarnation"_a, "first_token"_a = 0, "end_token"_a = 0,
          "crc"_a = false)
      .def(
          "send_runs",
          [](HandConnection& c, kvt::TransferHandle transfer,
             const std::vector<std::uint16_t>& layers, std::uint32_t first_token,
             std::uint32_t end_token, const nb::bytes& runs) {
            if (runs.size() % sizeof(kvt::Run) != 0) {
              throw kvt::Error(kvt::Code::kBadRequest, "runs: expected u64 triples");
            }
            auto list = std::make_shared<kvt::Runs>(runs.size() / sizeof(kvt::Run));
            std::memcpy(list->data(), runs.data(), runs.size());
            for (const std::uint16_t layer : layers) {
              c.connection().send_layer(transfer, {layer, first_token, end_token, list});
            }
          },
          "transfer"_a, "layers"_a, nb::kw_only(), "first_token"_a, "end_token"_a, "runs"_a,
          "runs: (src_offset, dst_offset, length) as native u64, as PlanPart.runs_bytes().")
      .def("end", [](HandConnection& c, kvt::TransferHandle t) { c.connection().end(t); })
      .def(
          "cancel",
          [](HandConnection& c, kvt::TransferHandle t, int code, std::string detail) {
            c.connection().cancel(t, kvt::code_from_wire(static_cast<std::uint64_t>(code)),
                                  std::move(detail));
          },
          "transfer"_a, "code"_a = 5, "detail"_a = "")
      .def(
          "close",
          [](HandConnection& c, int code, std::string detail) {
            c.connection().close(kvt::code_from_wire(static_cast<std::uint64_t>(code)),
                                 std::move(detail));
          },
          "code"_a = 5, "detail"_a = "closed")
      .def(
          "wait_result",
          [](HandConnection& c, kvt::TransferHandle t, double timeout_s) -> nb::object {
            auto& e = c.events();
            if (!c.wait(timeout_s, [&] { return e.results.contains(t); })) return nb::none();
            const std::lock_guard held(e.mutex);
            const auto& r = e.results[t];
            return nb::make_tuple(static_cast<int>(r.code), r.tokens, r.detail);
          },
          "transfer"_a, "timeout_s"_a,
          nb::sig("def wait_result(self, transfer: int, timeout_s: float) -> tuple[int, int, str] "
                  "| None"),
          "(code, tokens, detail), or None after the timeout.")
      .def(
          "is_released",
          [](HandConnection& c, kvt::TransferHandle t) {
            const std::lock_guard held(c.events().mutex);
            return c.events().released.contains(t);
          },
          "transfer"_a, "Nothing reads the source for it any more.")
      .def_prop_ro("transport",
                   [](HandConnection& c) { return std::string(c.connection().transport()); })
      .def_prop_ro("peer_layout", [](HandConnection& c) {
        const auto& bytes = c.connection().peer_layout();
        return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      });
}

}  // namespace

void bind_data_client(nb::module_& m) {
  nb::class_<kvt::Peer>(m, "DataPeer", "Whom a data connection leads to.")
      .def(nb::new_(&peer_of), nb::kw_only(), "instance"_a, "scheduler_incarnation"_a,
           "worker_incarnation"_a, "rank"_a, "address"_a);
  nb::class_<kvt::SendConnections>(m, "SendConnections",
                                   "Where a Sender gets its data connections from.");
  nb::class_<PythonDataClient, kvt::SendConnections>(
      m, "DataClient",
      "The sender rank's data connections, dialled on demand: Python serves the dial requests, "
      "everything else is native. The cache memory must live until close(). Any thread.")
      .def(nb::new_([](std::shared_ptr<kvt::RankCache> cache,
                       const std::vector<std::string>& transports, std::uint32_t connect_timeout_ms,
                       std::uint32_t progress_timeout_ms, const std::string& cuda_library) {
             kvt::DataClientConfig config;
             config.transports = transports_of(transports);
             config.connect_timeout_ms = connect_timeout_ms;
             config.progress_timeout_ms = progress_timeout_ms;
             if (cache->cuda_device()) {
               config.device_memory = kvt::cuda_device_memory(cuda_library);
             }
             return std::make_shared<PythonDataClient>(std::move(cache), std::move(config));
           }),
           "cache"_a, nb::kw_only(), "transports"_a = std::vector<std::string>{"cma", "tcp"},
           "connect_timeout_ms"_a = 3000, "progress_timeout_ms"_a = 30000, "cuda_library"_a = "",
           "transports: offered; the receiver chooses. One alone is forced.")
      .def_prop_ro(
          "dial_fd", [](const PythonDataClient& c) { return c.dials_.fd(); },
          "Readable while dial requests wait; for loop.add_reader. Owned by the client.")
      .def(
          "take_dials",
          [](PythonDataClient& c) {
            nb::list out;
            for (const auto& r : c.dials_.take()) {
              out.append(
                  nb::make_tuple(r.id, r.peer.instance, id_bytes(r.peer.scheduler_incarnation),
                                 id_bytes(r.peer.worker_incarnation), r.peer.rank, r.peer.address));
            }
            return out;
          },
          nb::sig("def take_dials(self) -> list[tuple[int, str, bytes, bytes, int, str]]"),
          "(id, instance, scheduler incarnation, worker incarnation, rank, address): connect, "
          "authenticate, call DATA, read GO, then adopt(id, fd); or dial_failed(id, ...).")
      .def(
          "adopt",
          [](PythonDataClient& c, std::uint64_t id, int fd) {
            const nb::gil_scoped_release released;
            check(c.client_.adopt(id, fd));
          },
          "id"_a, "fd"_a,
          "Takes the socket over, whatever happens. Raises NOT_FOUND if the request is over.")
      .def(
          "dial_failed",
          [](PythonDataClient& c, std::uint64_t id, int code, const std::string& detail) {
            c.client_.dial_failed(id, kvt::code_from_wire(static_cast<std::uint64_t>(code)),
                                  detail);
          },
          "id"_a, "code"_a, "detail"_a)
      .def(
          "drop_peer",
          [](PythonDataClient& c, const nb::bytes& worker_incarnation, int code,
             const std::string& detail) {
            c.drop_peer(id_from<kvt::Incarnation>(worker_incarnation, "worker_incarnation"),
                        kvt::code_from_wire(static_cast<std::uint64_t>(code)), detail);
          },
          "worker_incarnation"_a, "code"_a = 9, "detail"_a = "the peer is gone")
      .def(
          "snapshot",
          [](const PythonDataClient& c) {
            nb::list out;
            for (const auto& connection : c.client_.snapshot().connections) {
              out.append(connection_dict(connection));
            }
            return out;
          },
          nb::sig("def snapshot(self) -> list[dict[str, typing.Any]]"))
      .def("close", &PythonDataClient::close, nb::call_guard<nb::gil_scoped_release>(),
           "Ends all connections (ABORTED). Idempotent.");
  bind_hand_connection(m);
}

}  // namespace kvt_python
