// One suite for every kind of event, then what only one of them has.
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "kvt/cuda_driver.h"
#include "kvt/events.h"
#include "standin_loaded.h"

using namespace kvt;

namespace {

constexpr EventId kFirst{0, 0};
constexpr EventId kOther{1, 3};

// A compute stream of either kind, on which work can be put and finished.
class Work {
 public:
  virtual ~Work() = default;
  virtual std::uintptr_t handle() const = 0;
  virtual void submit() = 0;    // a piece of work that does not end by itself
  virtual void complete() = 0;  // all of it
  virtual void fail() = 0;      // it
};

class HostWork final : public Work {
 public:
  std::uintptr_t handle() const override { return stream_.handle(); }
  void submit() override { last_ = stream_.submit(); }
  void complete() override { stream_.complete(last_); }
  void fail() override { stream_.fail("kernel 7 failed"); }

 private:
  HostStream stream_;
  std::uint64_t last_ = 0;
};

class CudaWork final : public Work {
 public:
  std::uintptr_t handle() const override { return stream_.handle(); }
  void submit() override { standin::pause(stream_.get()); }
  void complete() override { standin::resume(stream_.get()); }
  void fail() override {}
  void* raw() const { return stream_.get(); }

 private:
  standin::Stream stream_;
};

struct Kind {
  const char* name;
  std::function<std::unique_ptr<Events>()> events;
  std::function<std::unique_ptr<Work>()> work;
  bool interruptible;
};

std::vector<Kind> kinds() {
  const auto cuda = [](EventWait policy) {
    return [policy] { return make_cuda_events(4, 4, 0, policy, standin::path()); };
  };
  return {
      {"host", [] { return make_host_events(4, 4); }, [] { return std::make_unique<HostWork>(); },
       true},
      {"cuda, blocking", cuda(EventWait::kBlock), [] { return std::make_unique<CudaWork>(); },
       false},
      {"cuda, query", cuda(EventWait::kQuery), [] { return std::make_unique<CudaWork>(); }, true}};
}

// wait() on a thread of its own.
class Waiting {
 public:
  Waiting(Events& events, EventId event)
      : thread_([this, &events, event] {
          status_ = events.wait(event);
          over_ = true;
        }) {}
  Status join() {
    thread_.join();
    return status_;
  }
  bool over() const { return over_; }

 private:
  std::atomic<bool> over_{false};
  Status status_;
  std::thread thread_;
};

}  // namespace

TEST(an_event_completes_with_the_work_before_it) {
  for (const Kind& kind : kinds()) {
    const auto events = kind.events();
    const auto work = kind.work();
    REQUIRE(events->prepare(0).ok());
    work->submit();
    REQUIRE(events->record(kFirst, work->handle()).ok());
    Waiting waiting(*events, kFirst);
    CHECK(!waiting.over());
    work->complete();
    CHECK(waiting.join().ok());
    CHECK(events->wait(kFirst).ok());  // and stays complete
  }
}

TEST(the_callers_default_stream_works) {
  for (const Kind& kind : kinds()) {
    const auto events = kind.events();
    REQUIRE(events->prepare(1).ok());
    CHECK(events->record(kOther, 0).ok());
    CHECK(events->wait(kOther).ok());
  }
}

TEST(recording_again_makes_a_later_wait_wait_again) {
  for (const Kind& kind : kinds()) {
    const auto events = kind.events();
    const auto work = kind.work();
    REQUIRE(events->prepare(0).ok());
    REQUIRE(events->record(kFirst, work->handle()).ok());
    CHECK(events->wait(kFirst).ok());
    work->submit();
    REQUIRE(events->record(kFirst, work->handle()).ok());
    Waiting waiting(*events, kFirst);
    REQUIRE(events->record(kFirst, work->handle()).ok());  // while somebody waits
    work->complete();
    CHECK(waiting.join().ok());
    CHECK(events->wait(kFirst).ok());
  }
}

TEST(an_unknown_stream_is_refused) {
  for (const Kind& kind : kinds()) {
    const auto events = kind.events();
    REQUIRE(events->prepare(0).ok());
    const Status refused = events->record(kFirst, 0xdead0);
    CHECK(!refused.ok());
    CHECK(!refused.detail.empty());
  }
}

TEST(interrupt_ends_waiting) {
  for (const Kind& kind : kinds()) {
    const auto events = kind.events();
    const auto work = kind.work();
    REQUIRE(events->prepare(0).ok());
    work->submit();
    REQUIRE(events->record(kFirst, work->handle()).ok());
    Waiting waiting(*events, kFirst);
    events->interrupt();
    if (!kind.interruptible) work->complete();
    const Status status = waiting.join();
    CHECK(kind.interruptible ? status.code == Code::kAborted : true);
    work->complete();
  }
}

TEST(host_work_that_fails_says_why) {
  const auto events = make_host_events(1, 1);
  HostStream stream;
  const auto first = stream.submit();
  stream.submit();
  REQUIRE(events->record({0, 0}, stream.handle()).ok());
  stream.complete(first);
  stream.fail("out of registers");
  const Status status = events->wait({0, 0});
  CHECK(status.code == Code::kInternal);
  CHECK_EQ(status.detail, std::string("out of registers"));
}

TEST(a_destroyed_host_stream_fails_its_events) {
  const auto events = make_host_events(1, 1);
  {
    HostStream stream;
    stream.submit();
    REQUIRE(events->record({0, 0}, stream.handle()).ok());
  }
  CHECK(events->wait({0, 0}).code == Code::kInternal);
}

TEST(a_device_fault_becomes_a_code) {
  for (const EventWait policy : {EventWait::kBlock, EventWait::kQuery}) {
    const auto events = make_cuda_events(1, 1, 0, policy, standin::path());
    const standin::Stream stream;
    REQUIRE(events->prepare(0).ok());
    standin::pause(stream.get());
    standin::fault(stream.get(), 719);
    REQUIRE(events->record({0, 0}, stream.handle()).ok());
    Waiting waiting(*events, {0, 0});
    standin::resume(stream.get());
    const Status status = waiting.join();
    CHECK(status.code == Code::kInternal);
    CHECK(status.detail.find("CUDA_ERROR_LAUNCH_FAILED (719)") != std::string::npos);
    CHECK(!events->record({0, 0}, stream.handle()).ok());  // the stream is dead from now on
  }
}

TEST(every_driver_call_that_fails_is_named) {
  const auto events = make_cuda_events(2, 2, 0, EventWait::kBlock, standin::path());
  const standin::Stream stream;
  standin::fail("cuEventCreate", 1, 2);
  const Status no_memory = events->prepare(0);
  CHECK(no_memory.code == Code::kBusy);
  CHECK(no_memory.detail.find("cuEventCreate: CUDA_ERROR_OUT_OF_MEMORY (2)") != std::string::npos);
  REQUIRE(events->prepare(0).ok());  // nothing half made was left behind
  standin::fail("cuEventRecord", 0, 400);
  CHECK(events->record({0, 0}, stream.handle()).detail.find("cuEventRecord") == 0);
  REQUIRE(events->record({0, 0}, stream.handle()).ok());
  standin::fail("cuEventQuery", 0, 201);
  CHECK(events->wait({0, 0}).detail.find("cuEventQuery") == 0);
  standin::pause(stream.get());
  REQUIRE(events->record({0, 0}, stream.handle()).ok());
  standin::fail("cuEventSynchronize", 0, 700);
  const Status lost = events->wait({0, 0});
  CHECK(lost.detail.find("cuEventSynchronize: unknown error (700)") == 0);
  standin::resume(stream.get());
}

TEST(the_callers_context_is_put_back) {
  const auto events = make_cuda_events(1, 1, 0, EventWait::kBlock, standin::path());
  std::thread([&] {
    void* current = &current;
    const auto get = standin::symbol<int(void**)>("cuCtxGetCurrent");
    CHECK(events->prepare(0).ok());  // this thread has no context of its own
    CHECK(events->record({0, 0}, 0).ok());
    CHECK(events->wait({0, 0}).ok());
    get(&current);
    CHECK(current == nullptr);
  }).join();
}

TEST(a_driver_that_cannot_be_used_says_why) {
  CHECK_THROWS(Error, CudaDriver::open("libnothing-of-this-name.so.9"));
  try {
    (void)CudaDriver::open("libm.so.6");
    CHECK(false);
  } catch (const Error& e) {
    const std::string what = e.what();
    CHECK(what.find("libm.so.6 lacks cuInit, ") != std::string::npos);
    CHECK(what.find("cuMemcpyHtoDAsync_v2") != std::string::npos);
  }
  CHECK_THROWS(Error, make_cuda_events(1, 1, 5, EventWait::kBlock, standin::path()));
}

TEST(nothing_is_left_on_the_device) {
  const auto before = standin::alive();
  {
    const auto events = make_cuda_events(4, 8, 0, EventWait::kBlock, standin::path());
    for (std::uint32_t set = 0; set < 4; ++set) CHECK(events->prepare(set).ok());
    CHECK(standin::alive() > before);
  }
  CHECK_EQ(standin::alive(), before);
}
