// cma (cross-memory attach): on one host the receiver copies straight out of the sender's memory
// with process_vm_readv. No payload travels; the descriptors' source offsets are looked up in the
// memory table of the greeting. A fenced socket does not stop a reader and a reader does not stop
// the owner, so whether the source was still held is asked afterwards (TransportType::confirms).
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "peer_process.h"
#include "transports/transport_type.h"

namespace kvt {
namespace {

constexpr std::size_t kMaxIovecs = 1024;                // IOV_MAX, on either side
constexpr std::uint64_t kMaxBytesPerCall = 4ull << 20;  // bounds what closing a grant waits for

class CmaPlacer final : public Placer {
 public:
  explicit CmaPlacer(const TransportContext& context) : context_(context) {}

  bool open(const wire::Hello& hello, std::string* why) {
    if (!process_.open(hello, why)) return false;
    try {
      for (const wire::Hello::Region& r : hello.regions) source_.add(r.layer, r.region);
    } catch (const Error& e) {
      *why = std::string("cma: the sender's memory table: ") + e.what();
      return false;
    }
    return true;
  }

  Status begin(std::span<const IpcBlock> blocks, std::optional<std::uint32_t> crc_seed) override {
    local_.clear();
    remote_.clear();
    crc_ = crc_seed;
    for (const IpcBlock& b : blocks) {
      if (!context_.memory->visit(b.layer, b.dst_offset, b.length, [this](const MemorySpan& s) {
            local_.add(s.host(), s.length);
          })) {
        return {Code::kBadRequest, "descriptor outside the cache"};
      }
      if (!source_.visit(b.layer, b.src_offset, b.length,
                         [this](const MemorySpan& s) { remote_.add(s.host(), s.length); })) {
        return {Code::kBadRequest, "descriptor outside the sender's memory"};
      }
    }
    return {};
  }

  Step place() override {
    const std::span<iovec> to = local_.next(kMaxIovecs, kMaxBytesPerCall);
    const std::span<iovec> from = remote_.next(kMaxIovecs, kMaxBytesPerCall);
    const ssize_t n =
        process_vm_readv(process_.pid(), to.data(), to.size(), from.data(), from.size(), 0);
    if (n < 0 && errno == EINTR) return {};
    const Step gone{StepKind::kPeerGone, 0, "the sender's process has ended"};
    // ESRCH: it is dying, its memory is gone, and the pidfd does not know yet.
    if (n < 0 && errno == ESRCH) return gone;
    if (n <= 0) {
      const std::string why = n < 0 ? std::strerror(errno) : "nothing read";
      return process_.is_alive() ? Step{StepKind::kFailed, 0, "process_vm_readv: " + why} : gone;
    }
    if (!process_.is_alive()) return gone;
    const auto bytes = static_cast<std::uint64_t>(n);
    if (crc_) crc_ = local_.checksum_window(bytes, *crc_);
    local_.advance(bytes);
    remote_.advance(bytes);
    return {local_.left() == 0 ? StepKind::kDone : StepKind::kMore, bytes, {}};
  }

  Status settle() override { return {}; }
  bool is_asynchronous() const override { return false; }
  std::uint32_t crc() const override { return crc_.value_or(0); }

 private:
  const TransportContext context_;
  PeerProcess process_;
  MemoryRegistry source_;  // addresses in the sender's process
  IoCursor local_;
  IoCursor remote_;
  std::optional<std::uint32_t> crc_;
};

class Cma final : public TransportType {
 public:
  wire::TransportKind kind() const override { return wire::TransportKind::kCma; }

  bool offer(const MemoryRegistry& memory, wire::Hello* hello) const override {
    if (memory.device() || !describe_own_process(hello)) return false;
    hello->regions.clear();
    for (std::size_t layer = 0; layer < memory.layer_limit(); ++layer) {
      const auto number = static_cast<std::uint16_t>(layer);
      for (const MemoryRegion& r : memory.regions(number)) hello->regions.push_back({number, r});
    }
    return hello->regions.size() <= wire::kMaxRegions;
  }

  std::unique_ptr<Placer> accept(const wire::Hello& hello, const TransportContext& context,
                                 std::string* why) const override {
    if (context.memory->device()) {
      *why = "cma: the cache is on a device";
      return nullptr;
    }
    auto placer = std::make_unique<CmaPlacer>(context);
    if (!placer->open(hello, why)) return nullptr;
    return placer;
  }

  // Only checks the ranges: the receiver would refuse them less kindly.
  Status payload(const PayloadRequest& request, std::unique_ptr<Payload>*) const override {
    for (std::size_t i = request.first; i < request.first + request.count; ++i) {
      const Run& run = request.runs[i];
      if (!request.context.memory->visit(request.layer, run.src_offset, run.length,
                                         [](const MemorySpan&) {})) {
        return {Code::kBadRequest, "a run outside the source layer"};
      }
    }
    return {};
  }

  bool carries_payload() const override { return false; }
  bool confirms() const override { return true; }
};

}  // namespace

const TransportType& cma_transport() {
  static const Cma type;
  return type;
}

}  // namespace kvt
