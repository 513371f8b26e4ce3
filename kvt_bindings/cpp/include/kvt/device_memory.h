// Bytes between device memory and the host, through pinned buffers, double-buffered: while one
// buffer is on the wire the copies of the other run. Used by data connections for spans of
// MemoryKind::kDevice; host memory never passes here.
//
// A stage belongs to one thread at a time (the connection's). It makes the device's context current
// on that thread at every call, copies on its own stream, and turns every driver error into a
// Status that names the call. After a failure a stage stays failed; destroy it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kvt/code.h"
#include "kvt/memory.h"

namespace kvt {

// Device → host. begin(spans), then next() until it gives an empty piece.
class DeviceReader {
 public:
  virtual ~DeviceReader() = default;

  // Starts filling both buffers from `spans`, in order; the array is copied. The spans' bytes must
  // be final (their layer's event has completed). Whatever an earlier begin() left is dropped.
  virtual Status begin(std::span<const MemorySpan> spans) = 0;

  // The next bytes in span order, in pinned memory, valid until the following call of begin() or
  // next(); that call also hands the buffer back for the copies after the next. Blocks for the
  // copies into this buffer only. Empty after the last byte.
  virtual Status next(std::span<const std::byte>* piece) = 0;

  // Forgets what was begun and returns when no copy reads device memory any more.
  virtual Status cancel() = 0;
};

// Host → device. For each piece: buffer(), fill it, scatter(); at the end flush().
class DeviceWriter {
 public:
  virtual ~DeviceWriter() = default;

  // A pinned buffer of min(`want_bytes`, buffer size) bytes, want_bytes > 0. Blocks only if the
  // copies out of this buffer, two pieces ago, still run.
  virtual Status buffer(std::size_t want_bytes, std::span<std::byte>* out) = 0;

  // Starts copying the front of the buffer of the last buffer() call to `spans`, in order; their
  // lengths sum to at most its size. At most one scatter per buffer().
  virtual Status scatter(std::span<const MemorySpan> spans) = 0;

  // Returns when every scattered byte is in device memory, or tells which copy failed.
  virtual Status flush() = 0;
};

inline constexpr std::size_t kDefaultStageBytes = 4u << 20;  // per buffer; two buffers per stage

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // Both throw Error (code INTERNAL, naming the driver call) if the stage cannot be made.
  virtual std::unique_ptr<DeviceReader> make_reader(
      int device, std::size_t buffer_bytes = kDefaultStageBytes) = 0;
  virtual std::unique_ptr<DeviceWriter> make_writer(
      int device, std::size_t buffer_bytes = kDefaultStageBytes) = 0;
};

// Device memory through the CUDA driver library `library` (empty: libcuda.so.1, or what the
// environment variable KVT_CUDA_LIBRARY names), opened once per path and process. Throws
// Error(INTERNAL) that names what is missing. Any thread.
std::shared_ptr<DeviceMemory> cuda_device_memory(const std::string& library = {});

}  // namespace kvt
