// tcp: the sender gathers from cache memory into the socket, the receiver scatters from the socket
// into cache memory. Device memory goes through pinned stages on either side.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "kvt/crc32c.h"
#include "transports/transport_type.h"

namespace kvt {
namespace {

constexpr std::size_t kMaxIovecs = 1024;  // IOV_MAX

Step received(ssize_t n) {
  if (n > 0) return {StepKind::kMore, static_cast<std::uint64_t>(n), {}};
  if (n == 0) return {StepKind::kPeerGone, 0, "the sender closed the connection"};
  if (errno == EAGAIN || errno == EWOULDBLOCK) return {StepKind::kWait, 0, {}};
  if (errno == EINTR) return {StepKind::kMore, 0, {}};
  return {StepKind::kPeerGone, 0, std::string("receive: ") + std::strerror(errno)};
}

class HostPlacer final : public Placer {
 public:
  explicit HostPlacer(const TransportContext& context) : context_(context) {}

  Status begin(std::span<const IpcBlock> blocks, std::optional<std::uint32_t> crc_seed) override {
    cursor_.clear();
    crc_ = crc_seed;
    for (const IpcBlock& b : blocks) {
      if (!context_.memory->visit(b.layer, b.dst_offset, b.length, [this](const MemorySpan& span) {
            cursor_.add(span.host(), span.length);
          })) {
        return {Code::kBadRequest, "descriptor outside the cache"};
      }
    }
    return {};
  }

  Step place() override {
    msghdr message{};
    const std::span<iovec> pieces = cursor_.next(kMaxIovecs);
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    const Step step = received(recvmsg(context_.socket, &message, MSG_DONTWAIT));
    if (crc_) crc_ = cursor_.checksum_window(step.bytes, *crc_);
    return moved(step);
  }

  Status settle() override { return {}; }
  bool is_asynchronous() const override { return false; }
  std::uint32_t crc() const override { return crc_.value_or(0); }

 private:
  Step moved(Step step) {
    cursor_.advance(step.bytes);
    if (step.kind == StepKind::kMore && cursor_.left() == 0) step.kind = StepKind::kDone;
    return step;
  }

  const TransportContext context_;
  IoCursor cursor_;
  std::optional<std::uint32_t> crc_;
};

// Socket → pinned buffer → device. A buffer is scattered when it is full or the frame ends; the
// copies of one buffer run while the next fills.
class DevicePlacer final : public Placer {
 public:
  explicit DevicePlacer(const TransportContext& context)
      : context_(context), writer_(context.device_memory->make_writer(*context.memory->device())) {}

  Status begin(std::span<const IpcBlock> blocks, std::optional<std::uint32_t> crc_seed) override {
    spans_.clear();
    at_ = 0;
    inside_ = 0;
    left_ = 0;
    filled_ = 0;
    buffer_ = {};
    crc_ = crc_seed;
    for (const IpcBlock& b : blocks) {
      if (!context_.memory->visit(b.layer, b.dst_offset, b.length, [this](const MemorySpan& span) {
            left_ += span.length;
            spans_.push_back(span);
          })) {
        return {Code::kBadRequest, "descriptor outside the cache"};
      }
    }
    return {};
  }

  Step place() override {
    const std::lock_guard held(mutex_);
    if (filled_ == buffer_.size()) {
      const Status room = writer_->buffer(left_, &buffer_);
      if (!room.ok()) return {StepKind::kFailed, 0, room.detail};
      filled_ = 0;
    }
    Step step = received(
        recv(context_.socket, buffer_.data() + filled_, buffer_.size() - filled_, MSG_DONTWAIT));
    filled_ += step.bytes;
    left_ -= step.bytes;
    if (filled_ == buffer_.size()) {
      if (crc_) crc_ = crc32c(buffer_.data(), filled_, *crc_);
      const Status copying = writer_->scatter(take(filled_));
      if (!copying.ok()) return {StepKind::kFailed, step.bytes, copying.detail};
      if (left_ == 0) step.kind = StepKind::kDone;
    }
    return step;
  }

  Status settle() override {
    const std::lock_guard held(mutex_);
    return writer_->flush();
  }
  bool is_asynchronous() const override { return true; }

  // What was staged stands for what the device holds.
  std::uint32_t crc() const override { return crc_.value_or(0); }

 private:
  // The destinations of the next `bytes`.
  std::span<const MemorySpan> take(std::uint64_t bytes) {
    piece_.clear();
    while (bytes > 0) {
      MemorySpan span = spans_[at_];
      span.address += inside_;
      span.length = std::min<std::uint64_t>(span.length - inside_, bytes);
      piece_.push_back(span);
      bytes -= span.length;
      inside_ += span.length;
      if (inside_ == spans_[at_].length) {
        ++at_;
        inside_ = 0;
      }
    }
    return piece_;
  }

  const TransportContext context_;
  std::mutex mutex_;  // a stage serves one thread at a time
  std::unique_ptr<DeviceWriter> writer_;
  std::vector<MemorySpan> spans_;
  std::vector<MemorySpan> piece_;
  std::span<std::byte> buffer_;
  std::size_t filled_ = 0;
  std::size_t at_ = 0;
  std::uint64_t inside_ = 0;
  std::uint64_t left_ = 0;
  std::optional<std::uint32_t> crc_;
};

class HostPayload final : public Payload {
 public:
  Status begin(const PayloadRequest& request) {
    for (std::size_t i = request.first; i < request.first + request.count; ++i) {
      const Run& run = request.runs[i];
      const auto add = [this](const MemorySpan& s) { cursor_.add(s.host(), s.length); };
      if (!request.context.memory->visit(request.layer, run.src_offset, run.length, add)) {
        return {Code::kBadRequest, "a run outside the source layer"};
      }
    }
    return {};
  }

  std::uint64_t left() const override { return cursor_.left(); }
  Status gather(std::size_t max_iovecs, std::vector<iovec>* out) override {
    const std::span<iovec> pieces = cursor_.next(max_iovecs);
    out->insert(out->end(), pieces.begin(), pieces.end());
    return {};
  }
  void advance(std::uint64_t bytes) override { cursor_.advance(bytes); }
  bool is_host() const override { return true; }
  void start_checksum(std::uint32_t seed) override { crc_ = cursor_.checksum(seed); }
  std::uint32_t checksum() const override { return crc_; }

 private:
  IoCursor cursor_;
  std::uint32_t crc_ = 0;
};

// Device → pinned buffer → socket; the reader fills one buffer while the other is on the wire.
class DevicePayload final : public Payload {
 public:
  Status begin(const PayloadRequest& request) {
    for (std::size_t i = request.first; i < request.first + request.count; ++i) {
      const Run& run = request.runs[i];
      const auto add = [this](const MemorySpan& span) {
        left_ += span.length;
        spans_.push_back(span);
      };
      if (!request.context.memory->visit(request.layer, run.src_offset, run.length, add)) {
        return {Code::kBadRequest, "a run outside the source layer"};
      }
    }
    reader_ = request.reader;
    return {};
  }

  std::uint64_t left() const override { return left_; }

  Status gather(std::size_t, std::vector<iovec>* out) override {
    if (!begun_) {  // not earlier: the reader belongs to one payload at a time
      const Status begun = reader_->begin(spans_);
      if (!begun.ok()) return begun;
      begun_ = true;
    }
    if (piece_.empty()) {
      const Status next = reader_->next(&piece_);
      if (!next.ok()) return next;
      if (piece_.empty()) return {Code::kInternal, "device reader ended early"};
      if (crc_) crc_ = crc32c(piece_.data(), piece_.size(), *crc_);
    }
    out->push_back({const_cast<std::byte*>(piece_.data()), piece_.size()});
    return {};
  }

  void advance(std::uint64_t bytes) override {
    piece_ = piece_.subspan(bytes);
    left_ -= bytes;
  }
  bool is_host() const override { return false; }
  void start_checksum(std::uint32_t seed) override { crc_ = seed; }
  std::uint32_t checksum() const override { return crc_.value_or(0); }

 private:
  DeviceReader* reader_ = nullptr;
  std::vector<MemorySpan> spans_;
  std::span<const std::byte> piece_;
  std::uint64_t left_ = 0;
  bool begun_ = false;
  std::optional<std::uint32_t> crc_;
};

class Tcp final : public TransportType {
 public:
  wire::TransportKind kind() const override { return wire::TransportKind::kTcp; }
  bool offer(const MemoryRegistry&, wire::Hello*) const override { return true; }

  std::unique_ptr<Placer> accept(const wire::Hello&, const TransportContext& context,
                                 std::string* why) const override {
    if (!context.memory->device()) return std::make_unique<HostPlacer>(context);
    if (context.device_memory == nullptr) {
      *why = "the cache is on a device and no device memory access was configured";
      return nullptr;
    }
    return std::make_unique<DevicePlacer>(context);
  }

  Status payload(const PayloadRequest& request, std::unique_ptr<Payload>* out) const override {
    if (request.reader == nullptr) return begin<HostPayload>(request, out);
    return begin<DevicePayload>(request, out);
  }

  bool carries_payload() const override { return true; }
  bool confirms() const override { return false; }

 private:
  template <class Kind>
  static Status begin(const PayloadRequest& request, std::unique_ptr<Payload>* out) {
    auto payload = std::make_unique<Kind>();
    Status begun = payload->begin(request);
    if (begun.ok()) *out = std::move(payload);
    return begun;
  }
};

}  // namespace

const TransportType& tcp_transport() {
  static const Tcp type;
  return type;
}

}  // namespace kvt
