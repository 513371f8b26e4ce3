// A CUDA driver without a GPU: the entry points kvt uses, with what makes the real one hard.
// Streams are threads that work through their operations later; events can be recorded again while
// somebody waits; calls without a current context, on foreign objects or with host memory that is
// not pinned are refused; any call can be made to fail.
#include "standin_cuda.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kNotInitialized = 3;
constexpr int kNoDevice = 100;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;
constexpr int kNotReady = 600;
constexpr int kLaunchFailed = 719;

constexpr unsigned long long kDeviceBit = 1ull << 62;

struct Event {
  std::uint64_t recorded = 0;   // number of cuEventRecord calls
  std::uint64_t completed = 0;  // the highest of them that the device has passed
  int error = kSuccess;
};

struct Stream {
  std::deque<std::function<int()>> queue;  // run in order on the stream's thread, unlocked
  bool running = false;
  bool paused = false;
  bool ending = false;
  int error = kSuccess;  // sticky, as a fault on a real device
  std::thread thread;
};

struct Driver {
  std::mutex mutex;
  std::condition_variable changed;
  bool initialised = false;
  std::uint32_t copy_delay_us = 0;
  std::set<Event*> events;
  std::vector<std::unique_ptr<Event>> destroyed;
  std::map<void*, std::unique_ptr<Stream>> streams;  // null key: the default stream
  std::map<char*, std::size_t> pinned;
  std::map<char*, std::size_t> device;
  std::map<std::string, std::pair<std::uint32_t, int>> failing;
  std::map<std::string, std::uint64_t> calls;
  std::uint64_t contexts = 0;
  char context = 0;  // its address is the primary context

  Driver() {
    const char* spec = std::getenv("KVT_STANDIN_FAIL");
    std::string text = spec != nullptr ? spec : "";
    while (!text.empty()) {
      const auto comma = text.find(',');
      const std::string one = text.substr(0, comma);
      text = comma == std::string::npos ? "" : text.substr(comma + 1);
      const auto a = one.find(':');
      const auto b = one.find(':', a + 1);
      if (a == std::string::npos || b == std::string::npos) std::abort();
      failing[one.substr(0, a)] = {static_cast<std::uint32_t>(std::stoul(one.substr(a + 1, b))),
                                   std::stoi(one.substr(b + 1))};
    }
  }
};

Driver& driver() {
  static Driver* const d = new Driver;  // stream threads may outlive static destruction
  return *d;
}

thread_local void* current_context = nullptr;

// Counts the call and says whether it is to fail. The caller holds the lock.
int enter(const char* name, bool needs_context = true) {
  Driver& d = driver();
  ++d.calls[name];
  if (const auto it = d.failing.find(name); it != d.failing.end()) {
    if (it->second.first == 0) {
      const int result = it->second.second;
      d.failing.erase(it);
      return result;
    }
    --it->second.first;
  }
  if (!d.initialised) return kNotInitialized;
  if (needs_context && current_context != &d.context) return kInvalidContext;
  return kSuccess;
}

void run_stream(Stream* stream) {
  Driver& d = driver();
  std::unique_lock lock(d.mutex);
  for (;;) {
    d.changed.wait(lock, [&] {
      return (stream->ending && stream->queue.empty()) ||
             (!stream->queue.empty() && !stream->paused);
    });
    if (stream->queue.empty()) return;
    const auto operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->running = true;
    lock.unlock();
    const int result = operation();
    lock.lock();
    stream->running = false;
    if (result != kSuccess && stream->error == kSuccess) stream->error = result;
    d.changed.notify_all();
  }
}

// The caller holds the lock. Null: no such stream.
Stream* find_stream(void* handle) {
  Driver& d = driver();
  const auto it = d.streams.find(handle);
  if (it != d.streams.end()) return it->second.get();
  if (handle != nullptr) return nullptr;
  auto& made = d.streams[nullptr];
  made = std::make_unique<Stream>();
  made->thread = std::thread(run_stream, made.get());
  made->thread.detach();  // the default stream lives as long as the process
  return made.get();
}

int put(void* handle, std::function<int()> operation) {
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->error != kSuccess) return stream->error;
  stream->queue.push_back(std::move(operation));
  driver().changed.notify_all();
  return kSuccess;
}

bool inside(const std::map<char*, std::size_t>& areas, const char* at, std::size_t bytes) {
  auto it = areas.upper_bound(const_cast<char*>(at));
  if (it == areas.begin()) return false;
  --it;
  const auto offset = static_cast<std::size_t>(at - it->first);
  return offset <= it->second && bytes <= it->second - offset;
}

char* image(unsigned long long address) {
  return reinterpret_cast<char*>(address ^ kDeviceBit);
}

int copy(const char* name, char* to, const char* from, bool to_device, std::size_t bytes,
         void* stream) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (const int refused = enter(name); refused != kSuccess) return refused;
  const char* on_device = to_device ? to : from;
  const char* on_host = to_device ? from : to;
  if (!inside(d.device, on_device, bytes) || !inside(d.pinned, on_host, bytes)) {
    return kInvalidValue;
  }
  const std::uint32_t delay_us = d.copy_delay_us;
  return put(stream, [=] {
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    std::memcpy(to, from, bytes);
    return kSuccess;
  });
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  d.initialised = true;
  return enter("cuInit", false);
}

int cuDriverGetVersion(int* version) {
  *version = 12000;
  return kSuccess;
}

int cuGetErrorName(int result, const char** name) {
  switch (result) {
    case kInvalidValue:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return kSuccess;
    case 2:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return kSuccess;
    case kInvalidContext:
      *name = "CUDA_ERROR_INVALID_CONTEXT";
      return kSuccess;
    case kInvalidHandle:
      *name = "CUDA_ERROR_INVALID_HANDLE";
      return kSuccess;
    case kLaunchFailed:
      *name = "CUDA_ERROR_LAUNCH_FAILED";
      return kSuccess;
    default:
      return kInvalidValue;  // and *name as it was: the real driver sets null
  }
}

int cuGetErrorString(int, const char** text) {
  *text = "said by the stand-in driver";
  return kSuccess;
}

int cuDeviceGetCount(int* count) {
  const char* hidden = std::getenv("KVT_STANDIN_DEVICES");
  *count = hidden != nullptr ? std::atoi(hidden) : 1;
  return kSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  if (ordinal != 0) return kInvalidDevice;
  *device = 0;
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (const int refused = enter("cuDevicePrimaryCtxRetain", false); refused != 0) return refused;
  if (device != 0) return kNoDevice;
  ++d.contexts;
  *context = &d.context;
  return kSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (d.contexts == 0) return kInvalidContext;
  --d.contexts;
  return kSuccess;
}

int cuCtxGetCurrent(void** context) {
  *context = current_context;
  return kSuccess;
}

int cuCtxSetCurrent(void* context) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (const int refused = enter("cuCtxSetCurrent", false); refused != 0) return refused;
  if (context != nullptr && context != &d.context) return kInvalidContext;
  current_context = context;
  return kSuccess;
}

int cuEventCreate(void** event, unsigned flags) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (const int refused = enter("cuEventCreate"); refused != 0) return refused;
  if (flags > 7) return kInvalidValue;
  auto* made = new Event;
  d.events.insert(made);
  *event = made;
  return kSuccess;
}

int cuEventDestroy_v2(void* event) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  auto* e = static_cast<Event*>(event);
  if (d.events.erase(e) == 0) return kInvalidHandle;
  d.destroyed.emplace_back(e);  // operations in flight may still refer to it
  return kSuccess;
}

int cuEventRecord(void* event, void* stream) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (const int refused = enter("cuEventRecord"); refused != 0) return refused;
  auto* e = static_cast<Event*>(event);
  if (!d.events.contains(e)) return kInvalidHandle;
  Stream* s = find_stream(stream);
  if (s == nullptr) return kInvalidHandle;
  if (s->error != kSuccess) return s->error;
  const std::uint64_t version = ++e->recorded;
  return put(stream, [e, s, version] {
    Driver& all = driver();
    const std::lock_guard inner(all.mutex);
    if (e->completed < version) e->completed = version;
    e->error = s->error;
    return kSuccess;
  });
}

int cuEventQuery(void* event) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (const int refused = enter("cuEventQuery"); refused != 0) return refused;
  auto* e = static_cast<Event*>(event);
  if (!d.events.contains(e)) return kInvalidHandle;
  if (e->completed < e->recorded) return kNotReady;  // never recorded: complete, as on CUDA
  return e->error;
}

int cuEventSynchronize(void* event) {
  Driver& d = driver();
  std::unique_lock lock(d.mutex);
  if (const int refused = enter("cuEventSynchronize"); refused != 0) return refused;
  auto* e = static_cast<Event*>(event);
  if (!d.events.contains(e)) return kInvalidHandle;
  const std::uint64_t version = e->recorded;
  d.changed.wait(lock, [&] { return e->completed >= version; });
  return e->error;
}

int cuStreamCreate(void** stream, unsigned) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (const int refused = enter("cuStreamCreate"); refused != 0) return refused;
  auto made = std::make_unique<Stream>();
  Stream* raw = made.get();
  raw->thread = std::thread(run_stream, raw);
  d.streams[raw] = std::move(made);
  *stream = raw;
  return kSuccess;
}

int cuStreamSynchronize(void* stream) {
  Driver& d = driver();
  std::unique_lock lock(d.mutex);
  if (const int refused = enter("cuStreamSynchronize"); refused != 0) return refused;
  Stream* s = find_stream(stream);
  if (s == nullptr) return kInvalidHandle;
  d.changed.wait(lock, [&] { return s->queue.empty() && !s->running; });
  return s->error;
}

int cuStreamDestroy_v2(void* stream) {
  Driver& d = driver();
  std::unique_ptr<Stream> gone;
  {
    const std::lock_guard lock(d.mutex);
    if (const int refused = enter("cuStreamDestroy"); refused != 0) return refused;
    const auto it = d.streams.find(stream);
    if (stream == nullptr || it == d.streams.end()) return kInvalidHandle;
    gone = std::move(it->second);
    d.streams.erase(it);
    gone->ending = true;
    gone->paused = false;
  }
  d.changed.notify_all();
  gone->thread.join();
  return kSuccess;
}

int cuMemHostAlloc(void** bytes, std::size_t size, unsigned) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (const int refused = enter("cuMemHostAlloc"); refused != 0) return refused;
  if (size == 0) return kInvalidValue;
  auto* made = static_cast<char*>(std::malloc(size));
  d.pinned[made] = size;
  *bytes = made;
  return kSuccess;
}

int cuMemFreeHost(void* bytes) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (d.pinned.erase(static_cast<char*>(bytes)) == 0) return kInvalidValue;
  std::free(bytes);
  return kSuccess;
}

int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, std::size_t bytes, void* stream) {
  return copy("cuMemcpyDtoHAsync", static_cast<char*>(to), image(from), false, bytes, stream);
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, std::size_t bytes, void* stream) {
  return copy("cuMemcpyHtoDAsync", image(to), static_cast<const char*>(from), true, bytes, stream);
}

// What tests in Python use of a driver, whether it is this one or a real one.

int cuMemAlloc_v2(unsigned long long* address, std::size_t bytes) {
  {
    Driver& d = driver();
    const std::lock_guard lock(d.mutex);
    if (const int refused = enter("cuMemAlloc"); refused != 0) return refused;
  }
  *address = standin_alloc(bytes);
  return kSuccess;
}

int cuMemFree_v2(unsigned long long address) {
  standin_free(address);
  return kSuccess;
}

int cuMemcpyHtoD_v2(unsigned long long to, const void* from, std::size_t bytes) {
  std::memcpy(image(to), from, bytes);
  return kSuccess;
}

int cuMemcpyDtoH_v2(void* to, unsigned long long from, std::size_t bytes) {
  std::memcpy(to, image(from), bytes);
  return kSuccess;
}

int cuMemsetD8Async(unsigned long long at, unsigned char value, std::size_t bytes, void* stream) {
  return standin_fill(stream, at, value, bytes, 100);
}

unsigned long long standin_alloc(std::size_t bytes) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  auto* made = static_cast<char*>(std::calloc(bytes, 1));
  d.device[made] = bytes;
  return reinterpret_cast<unsigned long long>(made) ^ kDeviceBit;
}

void standin_free(unsigned long long address) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (d.device.erase(image(address)) != 0) std::free(image(address));
}

void* standin_image(unsigned long long address) {
  return image(address);
}

void standin_pause(void* stream) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (Stream* s = find_stream(stream)) s->paused = true;
}

void standin_resume(void* stream) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (Stream* s = find_stream(stream)) s->paused = false;
  d.changed.notify_all();
}

int standin_fill(void* stream, unsigned long long address, int value, std::size_t bytes,
                 std::uint32_t delay_us) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  return put(stream, [=] {
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    std::memset(image(address), value, bytes);
    return kSuccess;
  });
}

int standin_fault(void* stream, int result) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  return put(stream, [result] { return result; });
}

void standin_set_copy_delay_us(std::uint32_t delay_us) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  d.copy_delay_us = delay_us;
}

void standin_fail(const char* entry_point, std::uint32_t skip, int result) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  d.failing[entry_point] = {skip, result};
}

std::uint64_t standin_calls(const char* entry_point) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  return d.calls[entry_point];
}

std::uint64_t standin_alive() {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  return d.events.size() + d.pinned.size() + d.contexts + d.streams.size() -
         d.streams.count(nullptr);
}
}
