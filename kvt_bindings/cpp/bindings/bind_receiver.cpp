// The receiver of one rank. Every call that takes a native lock gives the GIL back first.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "data_options.h"
#include "kvt/grant_news.h"
#include "kvt/receiver.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvt_python {
namespace {

void check(const kvt::Status& status) {
  if (!status.ok()) throw kvt::Error(status.code, status.detail);
}

nb::dict source_dict(const kvt::ReceiverSnapshot::Source& s) {
  nb::dict d;
  d["rank"] = s.rank;
  d["state"] = s.state;
  d["code"] = static_cast<int>(s.code);
  d["detail"] = s.detail;
  d["bytes_placed"] = s.bytes_placed;
  d["bytes_expected"] = s.bytes_expected;
  d["idle_s"] = s.idle_s < 0 ? nb::object(nb::none()) : nb::object(nb::float_(s.idle_s));
  return d;
}

nb::dict snapshot_dict(const kvt::ReceiverSnapshot& s) {
  nb::list grants;
  for (const auto& g : s.grants) {
    nb::list sources;
    for (const auto& source : g.sources) sources.append(source_dict(source));
    nb::dict d;
    d["key"] = id_bytes(g.key);
    d["sender_instance"] = g.sender_instance;
    d["first_token"] = g.first_token;
    d["end_token"] = g.end_token;
    d["num_blocks"] = g.num_blocks;
    d["progress_timeout_ms"] = g.progress_timeout_ms;
    d["sources"] = sources;
    grants.append(d);
  }
  nb::list connections;
  for (const auto& c : s.connections) {
    nb::dict d;
    d["id"] = c.id;
    d["instance"] = c.sender.instance;
    d["worker_incarnation"] = id_bytes(c.sender.worker_incarnation);
    d["address"] = c.sender.address;
    d["source_rank"] = c.source_rank;
    d["transport"] = c.transport;
    d["note"] = c.note;
    d["bytes_placed"] = c.bytes_placed;
    d["bytes_drained"] = c.bytes_drained;
    d["num_open"] = c.num_open;
    connections.append(d);
  }
  nb::dict d;
  d["grants"] = grants;
  d["connections"] = connections;
  d["num_marks"] = s.num_marks;
  d["bytes_placed"] = s.bytes_placed;
  d["bytes_drained"] = s.bytes_drained;
  d["num_completed"] = s.num_completed;
  d["num_failed"] = s.num_failed;
  d["num_violations"] = s.num_violations;
  d["num_refused_opens"] = s.num_refused_opens;
  d["num_repeats"] = s.num_repeats;
  d["num_corrupt"] = s.num_corrupt;
  d["num_marks_hit"] = s.num_marks_hit;
  d["num_connections_total"] = s.num_connections_total;
  return d;
}

}  // namespace

void bind_receiver(nb::module_& m) {
  bind_data_client(m);
  using Receiver = kvt::Receiver;
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Receiver>(
      m, "Receiver",
      "The only code that writes KV into this rank's cache, and only inside open grants. The cache "
      "memory must live until close(). Any thread.")
      .def(nb::new_(
               [](std::shared_ptr<kvt::RankCache> cache, std::shared_ptr<kvt::CompletionSink> sink,
                  const std::vector<std::string>& transports, std::uint32_t handshake_timeout_ms,
                  std::size_t max_connections, std::size_t max_open_per_connection,
                  std::size_t max_marks, const std::string& cuda_library) {
                 kvt::ReceiverConfig config;
                 config.transports = transports_of(transports);
                 config.handshake_timeout_ms = handshake_timeout_ms;
                 config.max_connections = max_connections;
                 config.max_open_per_connection = max_open_per_connection;
                 config.max_marks = max_marks;
                 if (cache->cuda_device()) {
                   config.device_memory = kvt::cuda_device_memory(cuda_library);
                 }
                 return std::make_shared<Receiver>(std::move(cache), std::move(sink),
                                                   std::move(config));
               }),
           "cache"_a, "sink"_a, nb::kw_only(),
           "transports"_a = std::vector<std::string>{"cma", "tcp"}, "handshake_timeout_ms"_a = 3000,
           "max_connections"_a = 4096, "max_open_per_connection"_a = 65536, "max_marks"_a = 65536,
           "cuda_library"_a = "",
           "transports: accepted, in order of preference; one alone is forced.")
      .def(
          "adopt",
          [](Receiver& r, int fd, std::string instance, const nb::bytes& worker_incarnation,
             std::string address) {
            const kvt::SenderIdentity sender{
                std::move(instance),
                id_from<kvt::Incarnation>(worker_incarnation, "worker_incarnation"),
                std::move(address)};
            const nb::gil_scoped_release released;
            check(r.adopt(fd, sender));
          },
          "fd"_a, nb::kw_only(), "instance"_a, "worker_incarnation"_a, "address"_a = "",
          "Takes an authenticated socket over (and closes it whatever happens): sends GO and "
          "serves it on a thread of its own.")
      .def(
          "open_grant",
          [](Receiver& r, const nb::bytes& key, const nb::bytes& scheduler_incarnation,
             std::string sender_instance, const nb::bytes& sender_incarnation,
             kvt::BlockLists block_ids, std::uint32_t first_token, std::uint32_t end_token,
             std::vector<std::uint32_t> source_ranks, std::uint32_t progress_timeout_ms) {
            kvt::GrantSpec spec;
            spec.key = id_from<kvt::TransferKey>(key, "key");
            spec.scheduler_incarnation =
                id_from<kvt::Incarnation>(scheduler_incarnation, "scheduler_incarnation");
            spec.sender_instance = std::move(sender_instance);
            spec.sender_incarnation =
                id_from<kvt::Incarnation>(sender_incarnation, "sender_incarnation");
            spec.block_ids = std::move(block_ids);
            spec.first_token = first_token;
            spec.end_token = end_token;
            spec.source_ranks = std::move(source_ranks);
            spec.progress_timeout_ms = progress_timeout_ms;
            const nb::gil_scoped_release released;
            check(r.open_grant(std::move(spec)));
          },
          "key"_a, nb::kw_only(), "scheduler_incarnation"_a, "sender_instance"_a,
          "sender_incarnation"_a, "block_ids"_a, "first_token"_a, "end_token"_a, "source_ranks"_a,
          "progress_timeout_ms"_a = 10000,
          "Raises KvtError: BAD_REQUEST (blocks, tokens or ranks that do not fit; open already), "
          "ABORTED (closed before it came), BUSY. Then nothing is owed; else each source rank owes "
          "one completion.")
      .def(
          "close_grant",
          [](Receiver& r, const nb::bytes& key, int code, const std::string& detail) {
            const auto id = id_from<kvt::TransferKey>(key, "key");
            const nb::gil_scoped_release released;
            check(r.close_grant(id, kvt::code_from_wire(static_cast<std::uint64_t>(code)), detail));
          },
          "key"_a, "code"_a = static_cast<int>(kvt::Code::kAborted),
          "detail"_a = "closed by the scheduler",
          "When it returns no byte of the transfer can land any more, and a later open of the key "
          "is not taken.")
      .def(
          "start_progress",
          [](Receiver& r, const nb::bytes& key) {
            const auto id = id_from<kvt::TransferKey>(key, "key");
            const nb::gil_scoped_release released;
            check(r.start_progress(id));
          },
          "key"_a, "The sender has started: the progress clock runs. Raises NOT_FOUND.")
      .def(
          "end_scheduler",
          [](Receiver& r, const nb::bytes& incarnation) {
            const auto id = id_from<kvt::Incarnation>(incarnation, "incarnation");
            const nb::gil_scoped_release released;
            r.end_scheduler(id);
          },
          "incarnation"_a, "Closes every grant of that scheduler incarnation, for good.")
      .def(
          "drop_peer",
          [](Receiver& r, const nb::bytes& worker_incarnation) {
            r.drop_peer(id_from<kvt::Incarnation>(worker_incarnation, "worker_incarnation"));
          },
          "worker_incarnation"_a, "Ends its connections; what they carried fails PEER_LOST.")
      .def(
          "serve",
          [](const std::shared_ptr<Receiver>& r, kvt::NewsChannel& channel, std::uint32_t rank) {
            kvt::serve_grants(channel, r, rank);
          },
          "channel"_a, "rank"_a, nb::keep_alive<1, 2>(),
          "Takes GRNT news from the scheduler and answers GACK, natively; before channel.start().")
      .def(
          "snapshot",
          [](const Receiver& r) {
            kvt::ReceiverSnapshot s;
            {
              const nb::gil_scoped_release released;
              s = r.snapshot();
            }
            return snapshot_dict(s);
          },
          nb::sig("def snapshot(self) -> dict[str, typing.Any]"),
          "Open grants with their sources, connections, and counters.")
      .def("close", &Receiver::close, no_gil,
           "Closes all grants (ABORTED) and connections, joins the threads. Idempotent.");
}

}  // namespace kvt_python
