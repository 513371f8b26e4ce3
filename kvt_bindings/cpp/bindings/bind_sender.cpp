// The sender of one rank. Its calls are short and wait for nobody, so most of them keep the GIL:
// giving it back beside a busy Python thread costs up to a switch interval, milliseconds. No native
// thread takes it. Only close(), drop_peer() and snapshot() give it back.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "data_options.h"
#include "kvt/send_news.h"
#include "kvt/sender.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvt_python {
namespace {

using TargetTuple = std::tuple<std::int32_t, nb::bytes, std::string>;
using OptionalId = std::optional<nb::bytes>;

// A sender and the scheduler that its calls speak for if they name none: the last one begun.
class PythonSender {
 public:
  PythonSender(std::shared_ptr<kvt::RankCache> cache, std::shared_ptr<kvt::CompletionSink> sink,
               std::shared_ptr<kvt::SendConnections> connections, kvt::SenderConfig config)
      : rank_(cache->rank()),
        sender_(std::make_shared<kvt::Sender>(std::move(cache), std::move(sink),
                                              std::move(connections), std::move(config))) {}

  kvt::Sender& native() { return *sender_; }
  const std::shared_ptr<kvt::Sender>& shared() const { return sender_; }
  std::uint32_t rank() const { return rank_; }

  void begin(const nb::bytes& scheduler) {
    const auto id = id_from<kvt::Incarnation>(scheduler, "scheduler");
    sender_->begin_scheduler(id);
    scheduler_ = id;
  }
  kvt::Incarnation scheduler(const OptionalId& named) const {
    return named ? id_from<kvt::Incarnation>(*named, "scheduler") : scheduler_;
  }
  void start_step(kvt::StepId step, std::uint64_t sched_tokens, std::uint32_t records_per_layer,
                  const OptionalId& named) {
    const auto id = scheduler(named);
    sender_->start_step(id, step, sched_tokens, records_per_layer);
    scheduler_ = id;
  }

 private:
  const std::uint32_t rank_;
  const std::shared_ptr<kvt::Sender> sender_;
  kvt::Incarnation scheduler_;
};

kvt::EventWait event_wait(const std::string& name) {
  if (name == "block") return kvt::EventWait::kBlock;
  if (name == "query") return kvt::EventWait::kQuery;
  throw kvt::Error(kvt::Code::kBadRequest,
                   "event_wait: expected \"block\" or \"query\", got \"" + name + "\"");
}

kvt::Send* new_send(const nb::bytes& key, std::string target_instance,
                    const nb::bytes& target_incarnation, const std::vector<TargetTuple>& targets,
                    kvt::BlockLists src_blocks, kvt::BlockLists dst_blocks,
                    std::uint32_t first_token, std::uint32_t end_token, bool last,
                    std::uint32_t transfer_end_token) {
  auto send = std::make_unique<kvt::Send>();
  send->key = id_from<kvt::TransferKey>(key, "key");
  send->target_instance = std::move(target_instance);
  send->target_incarnation = id_from<kvt::Incarnation>(target_incarnation, "target_incarnation");
  for (const auto& [rank, worker, address] : targets) {
    send->targets.push_back(
        {rank, id_from<kvt::Incarnation>(worker, "worker_incarnation"), address});
  }
  send->src_blocks = std::move(src_blocks);
  send->dst_blocks = std::move(dst_blocks);
  send->first_token = first_token;
  send->end_token = end_token;
  send->last = last;
  send->transfer_end_token = transfer_end_token;
  return send.release();
}

std::vector<kvt::Send> copies(const std::vector<const kvt::Send*>& sends) {
  std::vector<kvt::Send> out;
  out.reserve(sends.size());
  for (const kvt::Send* send : sends) out.push_back(*send);
  return out;
}

nb::dict step_dict(const kvt::StepView& s) {
  nb::dict d;
  d["step"] = s.step;
  d["sched_tokens"] = s.sched_tokens;
  d["frozen"] = s.frozen;
  d["flushed"] = s.flushed;
  d["taken_substep"] = s.taken_substep;
  d["num_kept_substeps"] = s.num_kept_substeps;
  d["num_sends"] = s.num_parts;
  d["missing_layers"] = nb::cast(s.missing);
  d["pending_layers"] = nb::cast(s.pending);
  return d;
}

nb::dict transfer_dict(const kvt::TransferView& t) {
  nb::list legs;
  for (const auto& leg : t.legs) {
    nb::dict d;
    d["target_rank"] = leg.target_rank;
    d["state"] = leg.state;
    d["num_layers_sent"] = leg.num_layers_sent;
    legs.append(d);
  }
  nb::dict d;
  d["key"] = id_bytes(t.key);
  d["target_instance"] = t.target_instance;
  d["first_token"] = t.first_token;
  d["end_token"] = t.end_token;
  d["last_seen"] = t.last_seen;
  d["age_s"] = t.age_s;
  d["num_sends_waiting"] = t.num_parts_waiting;
  d["targets"] = legs;
  return d;
}

nb::dict snapshot_dict(const kvt::SenderSnapshot& s) {
  nb::list steps;
  for (const auto& step : s.steps) steps.append(step_dict(step));
  nb::list transfers;
  for (const auto& transfer : s.transfers) transfers.append(transfer_dict(transfer));
  nb::dict d;
  d["scheduler"] = id_bytes(s.scheduler);
  d["steps"] = steps;
  d["transfers"] = transfers;
  d["num_kept_substeps"] = s.num_kept_substeps;
  d["num_refused"] = s.num_refused;
  d["num_attached"] = s.counts.num_attached;
  d["num_repeated"] = s.counts.num_repeated;
  d["num_late"] = s.counts.num_late;
  d["num_unknown_deltas"] = s.counts.num_unknown;
  d["num_marks_hit"] = s.counts.num_marks_hit;
  d["num_completed"] = s.counts.num_completed;
  d["num_failed"] = s.counts.num_failed;
  d["num_records"] = s.num_records;
  d["num_event_waits"] = s.num_event_waits;
  return d;
}

void bind_host_stream(nb::module_& m) {
  nb::class_<kvt::HostStream>(
      m, "HostStream",
      "A stream of work on the host, for engines that compute on threads of their own: work is "
      "announced, and later reported done, in order. Any thread.")
      .def(nb::init<>())
      .def_prop_ro("handle", &kvt::HostStream::handle, "For Sender.record_event.")
      .def("submit", &kvt::HostStream::submit, "Announces one more piece of work; its number.")
      .def("complete", &kvt::HostStream::complete, "work"_a,
           "All work up to this number is done and its writes are visible.")
      .def("fail", &kvt::HostStream::fail, "why"_a, "Events recorded after unfinished work fail.");
}

void bind_send(nb::module_& m) {
  nb::class_<kvt::Send>(m, "Send", "Tokens of one request, to the ranks of one receiver.")
      .def(nb::new_(&new_send), nb::kw_only(), "key"_a, "target_instance"_a, "target_incarnation"_a,
           "targets"_a, "src_blocks"_a, "dst_blocks"_a, "first_token"_a, "end_token"_a,
           "last"_a = true, "transfer_end_token"_a = 0,
           "targets: (rank, worker incarnation, address of its server). Block lists begin at token "
           "0 of the request, one per group. `last`: the transfer ends with this send. "
           "transfer_end_token: the end of the whole transfer if it is known to be later.")
      .def_static(
          "unpack",
          [](const nb::bytes& item) {
            kvt::msgpack::Reader reader(
                {static_cast<const std::uint8_t*>(item.data()), item.size()});
            return kvt::read_send(reader);
          },
          "item"_a, "From the packed form that SUBS and FRZN carry. Raises KvtError(BAD_REQUEST).")
      .def_prop_ro("key", [](const kvt::Send& s) { return id_bytes(s.key); })
      .def_ro("first_token", &kvt::Send::first_token)
      .def_ro("end_token", &kvt::Send::end_token)
      .def_ro("last", &kvt::Send::last);
}

}  // namespace

void bind_sender(nb::module_& m) {
  bind_host_stream(m);
  bind_send(m);
  nb::class_<PythonSender>(
      m, "Sender",
      "The sender of one rank: along the engine's steps, or at once, never waiting for a byte. The "
      "cache memory must live until close(). `scheduler`: an incarnation; None: the last begun.")
      .def(nb::new_([](std::shared_ptr<kvt::RankCache> cache,
                       std::shared_ptr<kvt::CompletionSink> sink,
                       std::shared_ptr<kvt::SendConnections> connections, bool crc, double whole_s,
                       double early_s, std::size_t max_open_steps, const std::string& wait,
                       std::string cuda_library) {
             kvt::SenderConfig config;
             config.crc = crc;
             config.ledger.whole_s = whole_s;
             config.timeline.early_s = early_s;
             config.timeline.max_open_steps = max_open_steps;
             config.event_wait = event_wait(wait);
             config.cuda_library = std::move(cuda_library);
             return std::make_shared<PythonSender>(std::move(cache), std::move(sink),
                                                   std::move(connections), std::move(config));
           }),
           "cache"_a, "sink"_a, "connections"_a, nb::kw_only(), "crc"_a = false,
           "whole_s"_a = 120.0, "early_s"_a = 5.0, "max_open_steps"_a = std::size_t{64},
           "event_wait"_a = "block", "cuda_library"_a = "",
           "crc: a CRC32C with every chunk. whole_s: deadline of a transfer. early_s: how long a "
           "substep waits for its step while none runs. event_wait: \"block\" or \"query\", for "
           "CUDA. Raises KvtError if the cache is on a device and the driver cannot be had.")
      .def("begin_scheduler", &PythonSender::begin, "scheduler"_a,
           "This incarnation speaks from now on; all of the one before ends (ABORTED).")
      .def(
          "end_scheduler",
          [](PythonSender& s, const nb::bytes& scheduler) {
            s.native().end_scheduler(id_from<kvt::Incarnation>(scheduler, "scheduler"));
          },
          "scheduler"_a, "That incarnation is gone; nothing happens if it is not the current one.")
      .def(
          "submit_send",
          [](PythonSender& s, kvt::StepId step, const kvt::Send& send,
             const OptionalId& scheduler) {
            s.native().submit_send(s.scheduler(scheduler), step, send);
          },
          "step"_a, "send"_a, nb::kw_only(), "scheduler"_a = nb::none(),
          "A send that rides `step`; before its start_step.")
      .def(
          "submit_delta",
          [](PythonSender& s, kvt::StepId step, const nb::bytes& key, kvt::BlockLists src_blocks,
             kvt::BlockLists dst_blocks, std::uint32_t first_token, std::uint32_t end_token,
             bool last, const OptionalId& scheduler) {
            s.native().submit_delta(s.scheduler(scheduler), step,
                                    id_from<kvt::TransferKey>(key, "key"), std::move(src_blocks),
                                    std::move(dst_blocks), first_token, end_token, last);
          },
          "step"_a, "key"_a, nb::kw_only(), "src_blocks"_a, "dst_blocks"_a, "first_token"_a,
          "end_token"_a, "last"_a, "scheduler"_a = nb::none(),
          "More tokens of a transfer that a send opened; the lists hold only what is new.")
      .def(
          "start_step",
          [](PythonSender& s, kvt::StepId step, std::uint64_t sched_tokens,
             std::uint32_t records_per_layer, const OptionalId& scheduler) {
            s.start_step(step, sched_tokens, records_per_layer, scheduler);
          },
          "step"_a, "sched_tokens"_a = 0, nb::kw_only(), "records_per_layer"_a = 1,
          "scheduler"_a = nb::none(), "Before the forward. Steps ascend; several may be open.")
      .def(
          "record_event",
          [](PythonSender& s, kvt::StepId step, std::uint16_t layer, std::uintptr_t stream) {
            s.native().record_event(step, layer, stream);
          },
          "step"_a, "layer"_a, "stream"_a = 0,
          "After the layer's attention was put on `stream`: a CUDA stream's handle, a "
          "HostStream.handle, or 0: the default stream, or work that is done already.")
      .def(
          "freeze_step",
          [](PythonSender& s, kvt::StepId step) { return s.native().freeze_step(step); }, "step"_a,
          "The highest contiguous substep taken, for ever the same.")
      .def(
          "flush_step", [](PythonSender& s, kvt::StepId step) { s.native().flush_step(step); },
          "step"_a, "No more records. Waits for no byte; unrecorded layers fail their sends.")
      .def(
          "start_substep",
          [](PythonSender& s, kvt::StepId step, kvt::SubstepId substep,
             const std::vector<const kvt::Send*>& sends, const OptionalId& scheduler) {
            return kvt::verdict_name(
                s.native().start_substep(s.scheduler(scheduler), step, substep, copies(sends)));
          },
          "step"_a, "substep"_a, "sends"_a, nb::kw_only(), "scheduler"_a = nb::none(),
          "Any thread. \"taken\", \"kept\" (early, or behind a gap), or refused: \"late\", "
          "\"duplicate\", \"stale\", \"full\".")
      .def(
          "send_frozen",
          [](PythonSender& s, const std::vector<const kvt::Send*>& sends,
             const OptionalId& scheduler) {
            s.native().send_frozen(s.scheduler(scheduler), copies(sends));
          },
          "sends"_a, nb::kw_only(), "scheduler"_a = nb::none(), "Complete KV: at once. Any thread.")
      .def(
          "cancel",
          [](PythonSender& s, const nb::bytes& key, int code, const std::string& detail) {
            s.native().cancel(id_from<kvt::TransferKey>(key, "key"),
                              kvt::code_from_wire(static_cast<std::uint64_t>(code)), detail);
          },
          "key"_a, "code"_a = static_cast<int>(kvt::Code::kAborted),
          "detail"_a = "cancelled by the scheduler",
          "Its open targets complete with `code`; one that is not open yet is marked.")
      .def(
          "drop_peer",
          [](PythonSender& s, const nb::bytes& worker, const std::string& detail) {
            const auto id = id_from<kvt::Incarnation>(worker, "worker_incarnation");
            const nb::gil_scoped_release released;
            s.native().drop_peer(id, detail);
          },
          "worker_incarnation"_a, "detail"_a = "the peer is gone",
          "What was on its way to that worker completes with PEER_LOST.")
      .def(
          "serve",
          [](PythonSender& s, kvt::NewsChannel& channel) {
            kvt::serve_sends(channel, s.shared(), s.rank());
          },
          "channel"_a, nb::keep_alive<1, 2>(),
          "Takes SUBS, FRZN and ABRT from the scheduler natively; before channel.start().")
      .def(
          "snapshot",
          [](PythonSender& s) {
            kvt::SenderSnapshot out;
            {
              const nb::gil_scoped_release released;
              out = s.native().snapshot();
            }
            return snapshot_dict(out);
          },
          nb::sig("def snapshot(self) -> dict[str, typing.Any]"),
          "What is open and why, and counters.")
      .def(
          "close", [](PythonSender& s) { s.native().close(); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Everything open completes with ABORTED; closes the connections, joins. Idempotent.");
}

}  // namespace kvt_python
