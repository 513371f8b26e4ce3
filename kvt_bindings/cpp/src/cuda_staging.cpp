#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "kvt/cuda_driver.h"
#include "kvt/device_memory.h"

namespace kvt {
namespace {

// A stream of its own and two pinned buffers, each with an event for its last copy.
class Stage {
 public:
  Stage(std::shared_ptr<const CudaContext> context, std::size_t buffer_bytes)
      : context_(std::move(context)), buffer_bytes_(std::max<std::size_t>(buffer_bytes, 4096)) {
    const CudaContext::Scope scope(*context_);
    if (!scope.status().ok()) throw Error(scope.status().code, scope.status().detail);
    try {
      const CudaDriver& d = driver();
      d.must(d.api().cuStreamCreate(&stream_, cuda::kStreamNonBlocking), "cuStreamCreate");
      for (Buffer& b : buffers_) {
        void* bytes = nullptr;
        d.must(d.api().cuMemHostAlloc(&bytes, buffer_bytes_, cuda::kHostAllocPortable),
               "cuMemHostAlloc");
        b.bytes = static_cast<std::byte*>(bytes);
        d.must(
            d.api().cuEventCreate(&b.copied, cuda::kEventBlockingSync | cuda::kEventDisableTiming),
            "cuEventCreate");
      }
    } catch (...) {
      release();
      throw;
    }
  }
  ~Stage() {
    const CudaContext::Scope scope(*context_);
    release();
  }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  const CudaDriver& driver() const { return context_->driver(); }
  const CudaContext& context() const { return *context_; }
  std::size_t buffer_bytes() const { return buffer_bytes_; }
  std::byte* bytes(std::size_t i) const { return buffers_[i].bytes; }
  cuda::Stream stream() const { return stream_; }

  Status mark(std::size_t i) {
    return driver().check(driver().api().cuEventRecord(buffers_[i].copied, stream_),
                          "cuEventRecord");
  }
  Status wait(std::size_t i) {
    return driver().check(driver().api().cuEventSynchronize(buffers_[i].copied),
                          "cuEventSynchronize");
  }
  Status wait_all() {
    return driver().check(driver().api().cuStreamSynchronize(stream_), "cuStreamSynchronize");
  }

 private:
  struct Buffer {
    std::byte* bytes = nullptr;
    cuda::Event copied = nullptr;
  };

  void release() {
    const CudaTable& api = driver().api();
    if (stream_ != nullptr) (void)api.cuStreamSynchronize(stream_);  // copies into the buffers
    for (const Buffer& b : buffers_) {
      if (b.copied != nullptr) (void)api.cuEventDestroy_v2(b.copied);
      if (b.bytes != nullptr) (void)api.cuMemFreeHost(b.bytes);
    }
    if (stream_ != nullptr) (void)api.cuStreamDestroy_v2(stream_);
  }

  std::shared_ptr<const CudaContext> context_;
  const std::size_t buffer_bytes_;
  cuda::Stream stream_ = nullptr;
  std::array<Buffer, 2> buffers_;
};

class CudaReader final : public DeviceReader {
 public:
  CudaReader(std::shared_ptr<const CudaContext> context, std::size_t buffer_bytes)
      : stage_(std::move(context), buffer_bytes) {}

  Status begin(std::span<const MemorySpan> spans) override {
    spans_.assign(spans.begin(), spans.end());
    span_ = 0;
    inside_ = 0;
    turn_ = 0;
    handed_out_ = false;
    return in_context([this] {
      Status status = fill(0);
      return status.ok() ? fill(1) : status;
    });
  }

  Status next(std::span<const std::byte>* piece) override {
    *piece = {};
    return in_context([&] {
      if (handed_out_) {
        if (Status status = fill(turn_); !status.ok()) return status;
        turn_ ^= 1;
      }
      handed_out_ = true;
      if (filled_[turn_] == 0) return Status{};
      if (Status status = stage_.wait(turn_); !status.ok()) return status;
      *piece = {stage_.bytes(turn_), filled_[turn_]};
      return Status{};
    });
  }

  Status cancel() override {
    spans_.clear();
    span_ = 0;
    inside_ = 0;
    filled_ = {};
    handed_out_ = false;
    const CudaContext::Scope scope(stage_.context());
    return scope.status().ok() ? stage_.wait_all() : scope.status();
  }

 private:
  template <class Work>
  Status in_context(Work&& work) {
    if (!failed_.ok()) return failed_;
    const CudaContext::Scope scope(stage_.context());
    failed_ = scope.status().ok() ? work() : scope.status();
    return failed_;
  }

  // Starts copies of the following bytes into buffer i.
  Status fill(std::size_t i) {
    const CudaTable& api = stage_.driver().api();
    std::size_t filled = 0;
    while (filled < stage_.buffer_bytes() && span_ < spans_.size()) {
      const MemorySpan& span = spans_[span_];
      const std::size_t n =
          std::min<std::size_t>(stage_.buffer_bytes() - filled, span.length - inside_);
      const Status status = stage_.driver().check(
          api.cuMemcpyDtoHAsync_v2(stage_.bytes(i) + filled, span.address + inside_, n,
                                   stage_.stream()),
          "cuMemcpyDtoHAsync");
      if (!status.ok()) return status;
      filled += n;
      inside_ += n;
      if (inside_ == span.length) {
        ++span_;
        inside_ = 0;
      }
    }
    filled_[i] = filled;
    return filled > 0 ? stage_.mark(i) : Status{};
  }

  Stage stage_;
  std::vector<MemorySpan> spans_;
  std::size_t span_ = 0;      // the first span not wholly copied
  std::uint64_t inside_ = 0;  // bytes of it copied
  std::array<std::size_t, 2> filled_{};
  std::size_t turn_ = 0;  // the buffer to give next, or given out
  bool handed_out_ = false;
  Status failed_;
};

class CudaWriter final : public DeviceWriter {
 public:
  CudaWriter(std::shared_ptr<const CudaContext> context, std::size_t buffer_bytes)
      : stage_(std::move(context), buffer_bytes) {}

  Status buffer(std::size_t want_bytes, std::span<std::byte>* out) override {
    return in_context([&] {
      if (busy_[turn_]) {
        if (Status status = stage_.wait(turn_); !status.ok()) return status;
        busy_[turn_] = false;
      }
      *out = {stage_.bytes(turn_), std::min(want_bytes, stage_.buffer_bytes())};
      return Status{};
    });
  }

  Status scatter(std::span<const MemorySpan> spans) override {
    return in_context([&] {
      const CudaTable& api = stage_.driver().api();
      std::size_t from = 0;
      for (const MemorySpan& span : spans) {
        if (span.length > stage_.buffer_bytes() - from) {
          return Status{Code::kInternal, "scatter of more bytes than the buffer has"};
        }
        const Status status =
            stage_.driver().check(api.cuMemcpyHtoDAsync_v2(span.address, stage_.bytes(turn_) + from,
                                                           span.length, stage_.stream()),
                                  "cuMemcpyHtoDAsync");
        if (!status.ok()) return status;
        from += span.length;
      }
      if (Status status = stage_.mark(turn_); !status.ok()) return status;
      busy_[turn_] = true;
      turn_ ^= 1;
      return Status{};
    });
  }

  Status flush() override {
    return in_context([this] {
      Status status = stage_.wait_all();
      if (status.ok()) busy_ = {};
      return status;
    });
  }

 private:
  template <class Work>
  Status in_context(Work&& work) {
    if (!failed_.ok()) return failed_;
    const CudaContext::Scope scope(stage_.context());
    failed_ = scope.status().ok() ? work() : scope.status();
    return failed_;
  }

  Stage stage_;
  std::array<bool, 2> busy_{};  // copies out of the buffer may still run
  std::size_t turn_ = 0;
  Status failed_;
};

class CudaMemory final : public DeviceMemory {
 public:
  explicit CudaMemory(const std::string& library) : driver_(CudaDriver::open(library)) {}

  std::unique_ptr<DeviceReader> make_reader(int device, std::size_t buffer_bytes) override {
    return std::make_unique<CudaReader>(context(device), buffer_bytes);
  }
  std::unique_ptr<DeviceWriter> make_writer(int device, std::size_t buffer_bytes) override {
    return std::make_unique<CudaWriter>(context(device), buffer_bytes);
  }

 private:
  std::shared_ptr<const CudaContext> context(int device) const {
    return std::make_shared<const CudaContext>(driver_, device);
  }

  std::shared_ptr<const CudaDriver> driver_;
};

}  // namespace

std::shared_ptr<DeviceMemory> cuda_device_memory(const std::string& library) {
  return std::make_shared<CudaMemory>(library);
}

}  // namespace kvt
