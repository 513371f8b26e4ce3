#include "kvt/data_protocol.h"

#include <algorithm>
#include <cstring>

namespace kvt::wire {
namespace {

// Reads fixed places one after the other; any overrun leaves it failed and yields zeros.
class Reader {
 public:
  explicit Reader(Body body) : body_(body) {}

  template <std::unsigned_integral T>
  T get() {
    const std::uint8_t* from = take(sizeof(T));
    return from == nullptr ? T{0} : load_le<T>(from);
  }
  template <class Array>
  void get_bytes(Array& out) {
    if (const std::uint8_t* from = take(out.size())) std::memcpy(out.data(), from, out.size());
  }
  std::span<const std::uint8_t> get_span(std::size_t size) {
    const std::uint8_t* from = take(size);
    return from == nullptr ? std::span<const std::uint8_t>{} : std::span(from, size);
  }
  std::size_t left() const { return body_.size() - at_; }
  bool exhausted() const { return !failed_ && at_ == body_.size(); }
  bool failed() const { return failed_; }

 private:
  const std::uint8_t* take(std::size_t size) {
    if (failed_ || size > left()) {
      failed_ = true;
      return nullptr;
    }
    const std::uint8_t* from = body_.data() + at_;
    at_ += size;
    return from;
  }

  Body body_;
  std::size_t at_ = 0;
  bool failed_ = false;
};

bool fail(std::string* why, std::string text) {
  *why = std::move(text);
  return false;
}

bool whole(const Reader& in, const char* frame, std::string* why) {
  if (in.exhausted()) return true;
  return fail(why, std::string(frame) + (in.failed() ? ": body too short" : ": bytes left over"));
}

// Writes head and length when it goes out of scope, around whatever was appended meanwhile.
class FrameScope {
 public:
  FrameScope(Buffer& to, std::uint32_t head) : to_(to), start_(to.size()) {
    append_le(to, head);
    append_le<std::uint32_t>(to, 0);
  }
  ~FrameScope() {
    store_le(to_.data() + start_ + 4,
             static_cast<std::uint32_t>(to_.size() - start_ - kFrameHeadBytes));
  }
  FrameScope(const FrameScope&) = delete;
  FrameScope& operator=(const FrameScope&) = delete;

 private:
  Buffer& to_;
  std::size_t start_;
};

template <class Bytes>
void append_bytes(Buffer& to, const Bytes& bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

void append_detail(Buffer& to, std::string_view detail) {
  detail = detail.substr(0, kMaxDetailBytes);
  append_le(to, static_cast<std::uint16_t>(detail.size()));
  append_bytes(to, detail);
}

bool get_detail(Reader& in, std::string* out, std::string* why) {
  const auto size = in.get<std::uint16_t>();
  if (size > kMaxDetailBytes) return fail(why, "detail of " + std::to_string(size) + " bytes");
  const auto text = in.get_span(size);
  out->assign(text.begin(), text.end());
  return true;
}

bool check_range(std::uint32_t first, std::uint32_t end, const char* frame, std::string* why) {
  if (first < end) return true;
  return fail(why, std::string(frame) + ": token range [" + std::to_string(first) + ", " +
                       std::to_string(end) + ") is empty");
}

void append_chunk(Buffer& to, const Chunk& chunk) {
  append_le(to, chunk.transfer);
  append_le(to, chunk.layer);
  append_le<std::uint16_t>(to, 0);
  append_le(to, chunk.first_token);
  append_le(to, chunk.end_token);
}

bool get_chunk(Reader& in, Chunk* out, const char* frame, std::string* why) {
  out->transfer = in.get<std::uint32_t>();
  out->layer = in.get<std::uint16_t>();
  if (in.get<std::uint16_t>() != 0) return fail(why, std::string(frame) + ": unknown flags");
  out->first_token = in.get<std::uint32_t>();
  out->end_token = in.get<std::uint32_t>();
  if (in.failed()) return fail(why, std::string(frame) + ": body too short");
  return check_range(out->first_token, out->end_token, frame, why);
}

}  // namespace

std::string_view transport_name(TransportKind kind) {
  switch (kind) {
    case TransportKind::kTcp:
      return "tcp";
    case TransportKind::kCma:
      return "cma";
  }
  return "unknown";
}

std::uint32_t max_body_bytes(std::uint32_t head) {
  constexpr std::uint32_t kSmall = 64;
  switch (head) {
    case kHello:
    case kWelcome:
      return kMaxHelloBytes;
    case kBlocks:
      return static_cast<std::uint32_t>(kBlocksHeaderBytes + kMaxBlocksPerFrame * sizeof(IpcBlock));
    case kOpen:
    case kChunkEnd:
    case kEnd:
    case kHeld:
    case kAskHeld:
      return kSmall;
    case kDone:
    case kCancel:
    case kFail:
      return kSmall + kMaxDetailBytes;
    default:
      return 0;
  }
}

void append(Buffer& to, const Hello& hello) {
  const FrameScope frame(to, kHello);
  append_le(to, hello.min_version);
  append_le(to, hello.max_version);
  append_le(to, static_cast<std::uint32_t>(hello.source_rank));
  append_le(to, static_cast<std::uint32_t>(hello.target_rank));
  append_le(to, hello.transports);
  append_le(to, hello.pid);
  append_le(to, hello.start_time_ticks);
  append_le(to, hello.nonce_address);
  append_bytes(to, hello.nonce);
  append_le(to, static_cast<std::uint32_t>(hello.layout.size()));
  append_le(to, static_cast<std::uint32_t>(hello.regions.size()));
  append_bytes(to, hello.layout);
  for (const Hello::Region& r : hello.regions) {
    append_le(to, r.layer);
    append_le(to, r.region.layer_offset);
    append_le(to, r.region.extent_bytes);
    append_le(to, r.region.address);
  }
}

bool decode(Body body, Hello* out, std::string* why) {
  Reader in(body);
  out->min_version = in.get<std::uint16_t>();
  out->max_version = in.get<std::uint16_t>();
  out->source_rank = static_cast<std::int32_t>(in.get<std::uint32_t>());
  out->target_rank = static_cast<std::int32_t>(in.get<std::uint32_t>());
  out->transports = in.get<std::uint32_t>();
  out->pid = in.get<std::uint32_t>();
  out->start_time_ticks = in.get<std::uint64_t>();
  out->nonce_address = in.get<std::uint64_t>();
  in.get_bytes(out->nonce);
  const auto layout_bytes = in.get<std::uint32_t>();
  const auto num_regions = in.get<std::uint32_t>();
  if (in.failed()) return fail(why, "KHEL: body too short");
  if (out->min_version > out->max_version) return fail(why, "KHEL: version range is empty");
  if (out->source_rank < 0 || out->target_rank < 0) return fail(why, "KHEL: negative rank");
  if (num_regions > kMaxRegions) {
    return fail(why, "KHEL: " + std::to_string(num_regions) + " memory regions");
  }
  const auto layout = in.get_span(layout_bytes);
  out->layout.assign(layout.begin(), layout.end());
  out->regions.clear();
  for (std::uint32_t i = 0; i < num_regions && !in.failed(); ++i) {
    Hello::Region r;
    r.layer = in.get<std::uint16_t>();
    r.region.layer_offset = in.get<std::uint64_t>();
    r.region.extent_bytes = in.get<std::uint64_t>();
    r.region.address = in.get<std::uint64_t>();
    out->regions.push_back(r);
  }
  return whole(in, "KHEL", why);
}

void append(Buffer& to, const Welcome& welcome) {
  const FrameScope frame(to, kWelcome);
  append_le(to, static_cast<std::uint8_t>(welcome.code));
  append_le(to, static_cast<std::uint8_t>(welcome.transport));
  append_le(to, welcome.version);
  append_le(to, static_cast<std::uint32_t>(welcome.layout.size()));
  append_detail(to, welcome.detail);
  append_bytes(to, welcome.layout);
}

bool decode(Body body, Welcome* out, std::string* why) {
  Reader in(body);
  out->code = code_from_wire(in.get<std::uint8_t>());
  const auto transport = in.get<std::uint8_t>();
  out->version = in.get<std::uint16_t>();
  const auto layout_bytes = in.get<std::uint32_t>();
  if (!get_detail(in, &out->detail, why)) return false;
  const auto layout = in.get_span(layout_bytes);
  out->layout.assign(layout.begin(), layout.end());
  if (!whole(in, "KWEL", why)) return false;
  if (transport > static_cast<std::uint8_t>(TransportKind::kCma)) {
    return fail(why, "KWEL: unknown transport " + std::to_string(transport));
  }
  out->transport = static_cast<TransportKind>(transport);
  return true;
}

void append(Buffer& to, const Open& open) {
  const FrameScope frame(to, kOpen);
  append_le(to, open.transfer);
  append_le(to, open.flags);
  append_bytes(to, open.key.bytes);
  append_bytes(to, open.sender_incarnation.bytes);
  append_le(to, open.first_token);
  append_le(to, open.end_token);
}

bool decode(Body body, Open* out, std::string* why) {
  Reader in(body);
  out->transfer = in.get<std::uint32_t>();
  out->flags = in.get<std::uint32_t>();
  in.get_bytes(out->key.bytes);
  in.get_bytes(out->sender_incarnation.bytes);
  out->first_token = in.get<std::uint32_t>();
  out->end_token = in.get<std::uint32_t>();
  if (!whole(in, "OPEN", why)) return false;
  if ((out->flags & ~kOpenFlagCrc) != 0) return fail(why, "OPEN: unknown flags");
  if (out->first_token == 0 && out->end_token == 0) return true;
  return check_range(out->first_token, out->end_token, "OPEN", why);
}

std::uint64_t append_blocks(Buffer& to, const Chunk& chunk, const Runs& runs, std::size_t first,
                            std::size_t count) {
  const std::size_t start = to.size();
  const std::size_t body = kBlocksHeaderBytes + count * sizeof(IpcBlock);
  to.reserve(start + kFrameHeadBytes + body);
  append_le(to, kBlocks);
  append_le(to, static_cast<std::uint32_t>(body));
  append_chunk(to, chunk);
  append_le(to, static_cast<std::uint32_t>(count));
  append_le<std::uint64_t>(to, 0);
  const std::size_t at = to.size();
  to.resize(at + count * sizeof(IpcBlock));
  std::uint8_t* out = to.data() + at;
  std::uint64_t payload = 0;
  for (std::size_t i = first; i < first + count; ++i, out += sizeof(IpcBlock)) {
    const Run& run = runs[i];
    store_le(out, run.src_offset);
    store_le(out + 8, run.dst_offset);
    store_le(out + 16, run.length);
    store_le(out + 24, chunk.transfer);
    store_le(out + 28, chunk.layer);
    payload += run.length;
  }
  store_le(to.data() + at - 8, payload);
  return payload;
}

bool decode(Body body, Blocks* out, std::string* why) {
  static_assert(std::endian::native == std::endian::little, "descriptors are read in place");
  Reader in(body);
  if (!get_chunk(in, &out->chunk, "DESC", why)) return false;
  const auto count = in.get<std::uint32_t>();
  out->payload_bytes = in.get<std::uint64_t>();
  if (in.failed()) return fail(why, "DESC: body too short");
  if (count == 0 || count > kMaxBlocksPerFrame || in.left() != count * sizeof(IpcBlock)) {
    return fail(why, "DESC: " + std::to_string(count) + " descriptors in " +
                         std::to_string(in.left()) + " bytes");
  }
  const auto raw = in.get_span(count * sizeof(IpcBlock));
  out->blocks = {reinterpret_cast<const IpcBlock*>(raw.data()), count};
  std::uint64_t sum = 0;
  for (const IpcBlock& b : out->blocks) {
    if (b.transfer != out->chunk.transfer || b.layer != out->chunk.layer) {
      return fail(why, "DESC: a descriptor of another transfer or layer");
    }
    if (b.length == 0 || b.length > kMaxPayloadBytes || (sum += b.length) > kMaxPayloadBytes) {
      return fail(why, "DESC: length out of bounds");
    }
  }
  if (sum != out->payload_bytes) {
    return fail(why, "DESC: lengths add up to " + std::to_string(sum) + ", announced " +
                         std::to_string(out->payload_bytes));
  }
  return true;
}

void append(Buffer& to, const ChunkEnd& end) {
  const FrameScope frame(to, kChunkEnd);
  append_chunk(to, end.chunk);
  append_le(to, end.crc32c);
}

bool decode(Body body, ChunkEnd* out, std::string* why) {
  Reader in(body);
  if (!get_chunk(in, &out->chunk, "LAYR", why)) return false;
  out->crc32c = in.get<std::uint32_t>();
  return whole(in, "LAYR", why);
}

void append_end(Buffer& to, std::uint32_t transfer) {
  const FrameScope frame(to, kEnd);
  append_le(to, transfer);
}

void append_ask_held(Buffer& to, std::uint32_t transfer) {
  const FrameScope frame(to, kAskHeld);
  append_le(to, transfer);
}

bool decode_transfer(Body body, std::uint32_t* out, std::string* why) {
  Reader in(body);
  *out = in.get<std::uint32_t>();
  return whole(in, "ENDT/ASKH", why);
}

void append_result(Buffer& to, std::uint32_t head, const Result& result) {
  const FrameScope frame(to, head);
  append_le(to, result.transfer);
  append_le(to, static_cast<std::uint8_t>(result.code));
  append_le(to, result.tokens);
  append_detail(to, result.detail);
}

bool decode(Body body, Result* out, std::string* why) {
  Reader in(body);
  out->transfer = in.get<std::uint32_t>();
  out->code = code_from_wire(in.get<std::uint8_t>());
  out->tokens = in.get<std::uint32_t>();
  if (!get_detail(in, &out->detail, why)) return false;
  return whole(in, "DONE/CANC/FAIL", why);
}

void append(Buffer& to, const Held& held) {
  const FrameScope frame(to, kHeld);
  append_le(to, held.transfer);
  append_le<std::uint8_t>(to, held.held ? 1 : 0);
}

bool decode(Body body, Held* out, std::string* why) {
  Reader in(body);
  out->transfer = in.get<std::uint32_t>();
  const auto held = in.get<std::uint8_t>();
  if (held > 1) return fail(why, "HELD: neither 0 nor 1");
  out->held = held == 1;
  return whole(in, "HELD", why);
}

}  // namespace kvt::wire
