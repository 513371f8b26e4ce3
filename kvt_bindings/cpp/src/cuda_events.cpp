#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "kvt/cuda_driver.h"
#include "kvt/events.h"

namespace kvt {
namespace {

// Naps of EventWait::kQuery: the first is about what a wake-up costs, the longest what a layer's
// start may be late by.
constexpr std::chrono::microseconds kFirstNap{20};
constexpr std::chrono::microseconds kLongestNap{500};

class CudaEvents final : public Events {
 public:
  CudaEvents(std::uint32_t max_sets, std::uint32_t events_per_set, int device, EventWait policy,
             const std::string& library)
      : context_(CudaDriver::open(library), device),
        events_per_set_(events_per_set),
        policy_(policy),
        sets_(max_sets) {}

  ~CudaEvents() override {
    const CudaContext::Scope scope(context_);
    for (const auto& set : sets_) {
      for (const cuda::Event event : set) (void)context_.api().cuEventDestroy_v2(event);
    }
  }

  Status prepare(std::uint32_t set) override {
    if (!sets_[set].empty()) return {};
    const CudaContext::Scope scope(context_);
    if (!scope.status().ok()) return scope.status();
    std::vector<cuda::Event> made;
    for (std::uint32_t i = 0; i < events_per_set_; ++i) {
      cuda::Event event = nullptr;
      const Status status =
          context_.driver().check(context_.api().cuEventCreate(
                                      &event, cuda::kEventBlockingSync | cuda::kEventDisableTiming),
                                  "cuEventCreate");
      if (!status.ok()) {
        for (const cuda::Event e : made) (void)context_.api().cuEventDestroy_v2(e);
        return status;
      }
      made.push_back(event);
    }
    sets_[set] = std::move(made);
    return {};
  }

  Status record(EventId event, std::uintptr_t stream) override {
    const CudaContext::Scope scope(context_);
    if (!scope.status().ok()) return scope.status();
    return context_.driver().check(
        context_.api().cuEventRecord(at(event), reinterpret_cast<cuda::Stream>(stream)),
        "cuEventRecord");
  }

  Status wait(EventId event) override {
    const CudaContext::Scope scope(context_);
    if (!scope.status().ok()) return scope.status();
    auto nap = kFirstNap;
    for (;;) {
      const cuda::Result ready = context_.api().cuEventQuery(at(event));
      if (ready != cuda::kNotReady) return context_.driver().check(ready, "cuEventQuery");
      if (interrupted_.load(std::memory_order_relaxed)) {
        return {Code::kAborted, "the sender is closing"};
      }
      if (policy_ == EventWait::kBlock) {
        return context_.driver().check(context_.api().cuEventSynchronize(at(event)),
                                       "cuEventSynchronize");
      }
      std::this_thread::sleep_for(nap);
      if (nap < kLongestNap) nap *= 2;
    }
  }

  void interrupt() override { interrupted_.store(true, std::memory_order_relaxed); }

 private:
  cuda::Event at(EventId event) const { return sets_[event.set][event.index]; }

  const CudaContext context_;
  const std::uint32_t events_per_set_;
  const EventWait policy_;
  std::vector<std::vector<cuda::Event>> sets_;  // sized once; a set is filled by prepare()
  std::atomic<bool> interrupted_{false};
};

}  // namespace

std::unique_ptr<Events> make_cuda_events(std::uint32_t max_sets, std::uint32_t events_per_set,
                                         int device, EventWait policy, const std::string& library) {
  return std::make_unique<CudaEvents>(max_sets, events_per_set, device, policy, library);
}

}  // namespace kvt
