// Completions into Python, and the native news channel to the scheduler.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "bindings.h"
#include "kvt/completion_queue.h"
#include "kvt/news_channel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvt_python {
namespace {

template <class Id>
nb::bytes id_bytes(const Id& id) {
  return nb::bytes(id.bytes.data(), id.bytes.size());
}

template <class Id>
Id id_from(const nb::bytes& data, const char* what) {
  if (data.size() != 16) {
    throw kvt::Error(kvt::Code::kBadRequest,
                     std::string(what) + ": expected 16 bytes, got " + std::to_string(data.size()));
  }
  return Id::from(data.data());
}

std::vector<std::uint8_t> vector_of(const nb::bytes& data) {
  const auto* p = static_cast<const std::uint8_t*>(data.data());
  return {p, p + data.size()};
}

void letters_of(const std::string& head, char (&out)[5]) {
  if (head.size() != 4) {
    throw kvt::Error(kvt::Code::kBadRequest, "news head \"" + head + "\": expected four letters");
  }
  std::memcpy(out, head.data(), 4);
  out[4] = 0;
}

nb::tuple completion_tuple(const kvt::Completion& c) {
  return nb::make_tuple(c.kind == kvt::Completion::Kind::kSendDone ? "send" : "load",
                        id_bytes(c.key), c.rank, c.other_rank, c.tokens, static_cast<int>(c.code),
                        c.detail);
}

kvt::Completion completion_from(bool is_load, const nb::bytes& key, std::uint32_t rank,
                                std::uint32_t other_rank, std::uint64_t tokens, int code,
                                std::string detail) {
  return {is_load ? kvt::Completion::Kind::kLoadDone : kvt::Completion::Kind::kSendDone,
          id_from<kvt::TransferKey>(key, "key"),
          rank,
          other_rank,
          tokens,
          kvt::code_from_wire(static_cast<std::uint64_t>(code)),
          std::move(detail)};
}

// Items of heads that Python takes, until it comes for them. The scheduler's own bound on
// unacknowledged news does not bound these, so there is one here.
class Inbox {
 public:
  static constexpr std::size_t kMaxItems = 1 << 16;

  void add(std::string head, const std::vector<std::uint8_t>& item) {
    const std::lock_guard lock(mutex_);
    if (items_.size() >= kMaxItems) {
      throw kvt::Error(kvt::Code::kBusy, "news for Python is not being taken");
    }
    items_.emplace_back(std::move(head), item);
    wake_.push({});
  }
  nb::list take() {
    std::deque<std::pair<std::string, std::vector<std::uint8_t>>> items;
    {
      const std::lock_guard lock(mutex_);
      items.swap(items_);
      (void)wake_.drain(kMaxItems + 1);
    }
    nb::list out;
    for (const auto& [head, item] : items) {
      out.append(nb::make_tuple(head, nb::bytes(item.data(), item.size())));
    }
    return out;
  }
  int fd() const { return wake_.wake_fd(); }

 private:
  std::mutex mutex_;
  std::deque<std::pair<std::string, std::vector<std::uint8_t>>> items_;
  kvt::CompletionQueue wake_;
};

void bind_queue(nb::module_& m) {
  nb::class_<kvt::CompletionSink>(m, "CompletionSink",
                                  "Where Sender and Receiver deliver completions.");
  nb::class_<kvt::CompletionQueue, kvt::CompletionSink>(
      m, "CompletionQueue", "Completions for a loop in this process, with one wake-up descriptor.")
      .def(nb::new_([](std::size_t max_reserved) {
             return std::make_shared<kvt::CompletionQueue>(max_reserved);
           }),
           "max_reserved"_a = std::size_t{1} << 16)
      .def_prop_ro("wake_fd", &kvt::CompletionQueue::wake_fd,
                   "Readable while completions wait; for loop.add_reader. Owned by the queue.")
      .def("reserve", &kvt::CompletionQueue::reserve, "n"_a = 1)
      .def("release", &kvt::CompletionQueue::release, "n"_a = 1)
      .def(
          "push",
          [](kvt::CompletionQueue& q, bool is_load, const nb::bytes& key, std::uint32_t rank,
             std::uint32_t other_rank, std::uint64_t tokens, int code, std::string detail) {
            q.push(
                completion_from(is_load, key, rank, other_rank, tokens, code, std::move(detail)));
          },
          nb::kw_only(), "is_load"_a, "key"_a, "rank"_a, "other_rank"_a, "tokens"_a, "code"_a = 0,
          "detail"_a = "", "What native threads do; here for tests of consumers.")
      .def(
          "drain",
          [](kvt::CompletionQueue& q, std::size_t max_items) {
            nb::list out;
            for (const auto& c : q.drain(max_items)) out.append(completion_tuple(c));
            return out;
          },
          "max_items"_a = 4096,
          nb::sig("def drain(self, max_items: int = 4096) -> list[tuple[str, bytes, int, int, int, "
                  "int, str]]"),
          "A batch, in order: (\"send\" or \"load\", key, rank, other rank, tokens, code, detail).")
      .def("close", &kvt::CompletionQueue::close)
      .def(
          "stats",
          [](const kvt::CompletionQueue& q) {
            const auto s = q.stats();
            nb::dict d;
            d["reserved"] = s.reserved;
            d["queued"] = s.queued;
            d["pushed"] = s.pushed;
            d["wakeups"] = s.wakeups;
            d["dropped_after_close"] = s.dropped_after_close;
            d["pushed_unreserved"] = s.pushed_unreserved;
            return d;
          },
          nb::sig("def stats(self) -> dict[str, int]"));
}

void bind_news(nb::module_& m) {
  nb::class_<Inbox>(m, "NewsInbox", "News that Python takes itself; see NewsChannel.inbox.")
      .def_prop_ro("wake_fd", &Inbox::fd, "Readable while items wait.")
      .def("take", &Inbox::take, nb::sig("def take(self) -> list[tuple[str, bytes]]"),
           "All that waits: (head, packed item), in order.");
  nb::class_<kvt::NewsChannel, kvt::CompletionSink>(
      m, "NewsChannel",
      "The worker's end of its channel to the scheduler, on a native thread, without the GIL.")
      .def(nb::new_([](std::string kind, std::uint32_t rank, std::uint32_t heartbeat_ms,
                       const nb::bytes& attributes, std::size_t max_slots,
                       std::uint32_t link_timeout_ms, std::uint32_t ack_timeout_ms) {
             kvt::NewsChannelConfig config;
             config.kind = std::move(kind);
             config.rank = rank;
             config.heartbeat_ms = heartbeat_ms;
             config.link_timeout_ms = link_timeout_ms;
             config.ack_timeout_ms = ack_timeout_ms;
             config.max_slots = max_slots;
             config.attributes = vector_of(attributes);
             return std::make_shared<kvt::NewsChannel>(std::move(config));
           }),
           nb::kw_only(), "kind"_a = "worker", "rank"_a, "heartbeat_ms"_a = 1000,
           "attributes"_a = nb::bytes("", 0), "max_slots"_a = std::size_t{1} << 16,
           "link_timeout_ms"_a = 3000, "ack_timeout_ms"_a = 30000,
           "attributes: a packed msgpack map that LINK carries.")
      .def(
          "inbox",
          [](kvt::NewsChannel& c, const std::vector<std::string>& heads) {
            auto inbox = std::make_shared<Inbox>();
            for (const auto& head : heads) {
              char letters[5];
              letters_of(head, letters);
              c.on(letters, [inbox, head](kvt::msgpack::Reader item) {
                const auto bytes = item.skip("news");
                inbox->add(head, {bytes.begin(), bytes.end()});
              });
            }
            return inbox;
          },
          "heads"_a, "Take news of these heads in Python; before start().")
      .def("start", &kvt::NewsChannel::start)
      .def(
          "attach",
          [](kvt::NewsChannel& c, int fd, const nb::bytes& peer) {
            c.attach(fd, id_from<kvt::Incarnation>(peer, "peer"));
          },
          "fd"_a, "peer_incarnation"_a,
          "A connection after HELLO; the descriptor is the channel's from now on.")
      .def("end_peer", &kvt::NewsChannel::end_peer, "detail"_a,
           "The scheduler is gone for good: its grants close, its news is dropped.")
      .def(
          "publish",
          [](kvt::NewsChannel& c, const std::string& head, const nb::bytes& item) {
            char letters[5];
            letters_of(head, letters);
            c.publish(letters, vector_of(item));
          },
          "head"_a, "item"_a, "One packed item; never blocks.")
      .def("reserve", &kvt::NewsChannel::reserve, "n"_a = 1)
      .def("release", &kvt::NewsChannel::release, "n"_a = 1)
      .def("flush", &kvt::NewsChannel::flush, "timeout_ms"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "True once all that was published is acknowledged.")
      .def("stop", &kvt::NewsChannel::stop, nb::call_guard<nb::gil_scoped_release>(),
           "FAIL to the scheduler, close, join. Idempotent.")
      .def_prop_ro("event_fd", &kvt::NewsChannel::event_fd,
                   "Readable while events wait; owned by the channel.")
      .def(
          "take_events",
          [](kvt::NewsChannel& c) {
            nb::list out;
            for (const auto& e : c.take_events()) {
              const bool attached = e.kind == kvt::NewsChannelEvent::Kind::kAttached;
              out.append(nb::make_tuple(attached ? "attached" : "detached", id_bytes(e.peer),
                                        e.is_new_peer, e.num_dropped, static_cast<int>(e.code),
                                        e.detail));
            }
            return out;
          },
          nb::sig("def take_events(self) -> list[tuple[str, bytes, bool, int, int, str]]"),
          "(\"attached\" or \"detached\", peer incarnation, new peer, dropped items, code, detail)")
      .def(
          "stats",
          [](const kvt::NewsChannel& c) {
            const auto s = c.stats();
            nb::dict d;
            d["attached"] = s.attached;
            d["peer"] = id_bytes(s.peer);
            d["reserved"] = s.reserved;
            d["unacked"] = s.unacked;
            d["published"] = s.published;
            d["published_unreserved"] = s.published_unreserved;
            d["acked"] = s.acked;
            d["frames_sent"] = s.frames_sent;
            d["items_resent"] = s.items_resent;
            d["dropped"] = s.dropped;
            d["received"] = s.received;
            d["duplicates"] = s.duplicates;
            d["violations"] = s.violations;
            d["attaches"] = s.attaches;
            return d;
          },
          nb::sig("def stats(self) -> dict[str, bool | bytes | int]"));
}

}  // namespace

void bind_channel(nb::module_& m) {
  bind_queue(m);
  bind_news(m);
}

}  // namespace kvt_python
