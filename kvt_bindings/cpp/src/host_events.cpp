#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kvt/events.h"

namespace kvt {
namespace {

struct StreamState {
  std::uint64_t submitted = 0;
  std::uint64_t completed = 0;
  std::string failed;  // why, or empty
};

// All host streams of the process. One lock and one condition: they carry a few marks per step.
struct Streams {
  std::mutex mutex;
  std::condition_variable changed;
  std::uintptr_t next_handle = 1;
  std::map<std::uintptr_t, std::shared_ptr<StreamState>> by_handle;
};

Streams& streams() {
  static Streams* const all = new Streams;  // outlives every stream, whatever the order at exit
  return *all;
}

class HostEvents final : public Events {
 public:
  HostEvents(std::uint32_t max_sets, std::uint32_t events_per_set)
      : events_per_set_(events_per_set), marks_(std::size_t{max_sets} * events_per_set) {}

  Status prepare(std::uint32_t) override { return {}; }

  Status record(EventId event, std::uintptr_t stream) override {
    Mark mark;
    Streams& all = streams();
    const std::lock_guard lock(all.mutex);
    if (stream != 0) {
      const auto it = all.by_handle.find(stream);
      if (it == all.by_handle.end()) {
        return {Code::kBadRequest, "no host stream " + std::to_string(stream)};
      }
      mark = {it->second, it->second->submitted};
    }
    marks_[at(event)] = std::move(mark);
    return {};
  }

  Status wait(EventId event) override {
    Streams& all = streams();
    std::unique_lock lock(all.mutex);
    const Mark mark = marks_[at(event)];
    if (mark.stream == nullptr) return {};
    const StreamState& stream = *mark.stream;
    all.changed.wait(lock, [&] {
      return interrupted_ || !stream.failed.empty() || stream.completed >= mark.work;
    });
    if (stream.completed >= mark.work) return {};
    if (!stream.failed.empty()) return {Code::kInternal, stream.failed};
    return {Code::kAborted, "the sender is closing"};
  }

  void interrupt() override {
    Streams& all = streams();
    {
      const std::lock_guard lock(all.mutex);
      interrupted_ = true;
    }
    all.changed.notify_all();
  }

 private:
  struct Mark {
    std::shared_ptr<const StreamState> stream;  // null: complete
    std::uint64_t work = 0;
  };
  std::size_t at(EventId event) const {
    return std::size_t{event.set} * events_per_set_ + event.index;
  }

  const std::uint32_t events_per_set_;
  std::vector<Mark> marks_;  // guarded by streams().mutex, as is the flag
  bool interrupted_ = false;
};

std::uintptr_t add_stream() {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  const std::uintptr_t handle = all.next_handle++;
  all.by_handle.emplace(handle, std::make_shared<StreamState>());
  return handle;
}

// Changes one stream's state under the lock and wakes whoever waits.
template <class Change>
auto change(std::uintptr_t handle, Change&& how) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  all.changed.notify_all();
  return how(*all.by_handle.at(handle));
}

}  // namespace

HostStream::HostStream() : handle_(add_stream()) {}

HostStream::~HostStream() {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  const auto it = all.by_handle.find(handle_);
  if (it->second->failed.empty()) it->second->failed = "the host stream was destroyed";
  all.by_handle.erase(it);
  all.changed.notify_all();
}

std::uint64_t HostStream::submit() {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  return ++all.by_handle.at(handle_)->submitted;
}

void HostStream::complete(std::uint64_t work) {
  change(handle_, [work](StreamState& s) {
    if (s.completed < work) s.completed = work;
  });
}

void HostStream::fail(std::string why) {
  change(handle_, [&why](StreamState& s) {
    if (s.failed.empty()) s.failed = why.empty() ? "the host stream failed" : std::move(why);
  });
}

std::unique_ptr<Events> make_host_events(std::uint32_t max_sets, std::uint32_t events_per_set) {
  return std::make_unique<HostEvents>(max_sets, events_per_set);
}

}  // namespace kvt
