// Layer events: marks on a compute stream whose completion means that the bytes before are final.
//
// Contract, the same for CUDA and for the host:
//   record()  on the thread that put the work on the stream; returns once the mark is placed, and
//             until then nobody waits for it: an event that was not recorded yet looks complete.
//   wait()    blocks until all that was recorded into the event when wait() was called is done.
//             Recording again meanwhile is allowed; whoever waits compares record counts after.
//   An event set belongs to one step at a time; sets are reused when nothing waits for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kvt/code.h"

namespace kvt {

struct EventId {
  std::uint32_t set = 0;
  std::uint32_t index = 0;
};

class Events {
 public:
  virtual ~Events() = default;

  // Makes the events of `set` exist. One caller at a time; before the first record into the set.
  virtual Status prepare(std::uint32_t set) = 0;

  // `stream`: a CUstream's value (0: the default stream), or a HostStream's handle (0: the calling
  // thread itself, whose work is done when record() is called). Never blocks for the work.
  virtual Status record(EventId event, std::uintptr_t stream) = 0;

  // ABORTED if interrupt() was called. INTERNAL with the driver's words if the work failed.
  virtual Status wait(EventId event) = 0;

  // Ends wait() now and in future (cuda with EventWait::kBlock: once the driver returns).
  virtual void interrupt() = 0;
};

// Both hold `max_sets` sets of `events_per_set` events.
std::unique_ptr<Events> make_host_events(std::uint32_t max_sets, std::uint32_t events_per_set);

enum class EventWait : std::uint8_t {
  kBlock,  // cuEventSynchronize on a blocking-sync event: no CPU time; cannot be interrupted
  kQuery,  // cuEventQuery with short naps: can be interrupted, for streams that may never finish
};

// Throws Error if the driver or the device cannot be had.
std::unique_ptr<Events> make_cuda_events(std::uint32_t max_sets, std::uint32_t events_per_set,
                                         int device, EventWait policy,
                                         const std::string& library = {});

// A stream of work on the host, for engines whose kernels run on threads of their own, and for
// tests: work is announced, and later reported done, in order.
class HostStream {
 public:
  HostStream();
  ~HostStream();  // its unfinished work counts as failed
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  // To give to record_event. Never 0, never reused.
  std::uintptr_t handle() const { return handle_; }

  // Announces one more piece of work; its number, from 1. Any thread.
  std::uint64_t submit();
  // All work up to number `work` is done, and its writes happened before this call. Any thread.
  void complete(std::uint64_t work);
  // The work fails: events recorded after it, and waited for, say so. Any thread.
  void fail(std::string why);

 private:
  const std::uintptr_t handle_;
};

}  // namespace kvt
