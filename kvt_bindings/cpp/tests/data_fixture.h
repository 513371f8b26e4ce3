// Caches, sinks and connected pairs for the tests of the byte path; all real, in one process.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "kvt/data_client.h"
#include "kvt/data_protocol.h"
#include "kvt/receiver.h"

namespace data_test {

using namespace kvt;  // NOLINT: a test's own header

inline constexpr auto kGuard = std::chrono::seconds(30);  // a deadlock guard, never a measurement

// Flash layout (2, B, T, H, D), 2-byte items.
struct Shape {
  std::uint16_t layers = 3;
  std::uint64_t blocks = 16;
  std::uint32_t block_tokens = 4;
  std::uint32_t heads_total = 2;
  std::uint32_t head_dim = 8;
  std::uint32_t tp = 1;
  std::string model = "m";

  std::uint64_t heads() const { return heads_total / tp; }
  std::uint64_t token_bytes() const { return heads() * head_dim * 2; }
  std::uint64_t block_bytes() const { return token_bytes() * block_tokens; }
  std::uint64_t layer_bytes() const { return 2 * blocks * block_bytes(); }

  std::shared_ptr<const Layout> layout() const {
    auto l = std::make_shared<Layout>();
    l->model = model;
    l->tp_size = tp;
    l->groups = {Group{block_tokens}};
    View v;
    v.name = "kv";
    v.dtype = "bf16";
    v.item_bytes = 2;
    v.heads_total = heads_total;
    v.dim = {head_dim, 2};
    v.head = {heads(), head_dim * 2ull};
    v.token = {block_tokens, token_bytes()};
    v.block = {blocks, block_bytes()};
    v.kv = {2, blocks * block_bytes()};
    Pattern p;
    p.tensor_bytes = {layer_bytes()};
    p.views = {v};
    l->patterns = {p};
    for (std::uint16_t i = 0; i < layers; ++i) l->layers.push_back({i, 0, 0, 0});
    l->validate();
    return l;
  }
};

// One rank's cache in host memory.
struct Cache {
  Shape shape;
  std::vector<std::vector<std::uint8_t>> memory;
  std::shared_ptr<const RankCache> cache;

  explicit Cache(const Shape& s, std::uint32_t rank = 0) : shape(s) {
    std::vector<LayerMemory> layers;
    for (std::uint16_t i = 0; i < s.layers; ++i) {
      memory.emplace_back(s.layer_bytes());
      LayerMemory m;
      m.layer = i;
      m.tensors = {{memory.back().data(), memory.back().size()}};
      layers.push_back(m);
    }
    cache = std::make_shared<RankCache>(s.layout(), rank, std::move(layers));
  }

  void fill(std::uint32_t seed) {
    std::uint32_t x = seed * 2654435761u + 1;
    for (auto& layer : memory) {
      for (auto& b : layer) {
        x = x * 1664525u + 1013904223u;
        b = static_cast<std::uint8_t>(x >> 24);
      }
    }
  }
};

class Sink final : public CompletionSink {
 public:
  bool reserve(std::size_t n) override {
    const std::lock_guard held(mutex_);
    reserved_ += n;
    return true;
  }
  void push(Completion completion) override {
    const std::lock_guard held(mutex_);
    items_.push_back(std::move(completion));
    changed_.notify_all();
  }
  // The first n completions, in order.
  std::vector<Completion> wait(std::size_t n) {
    std::unique_lock held(mutex_);
    if (!changed_.wait_for(held, kGuard, [&] { return items_.size() >= n; })) {
      check::fail(__FILE__, __LINE__, "completions do not come");
    }
    return items_;
  }
  Completion last(std::size_t n) {
    const auto all = wait(n);
    return all.size() >= n ? all[n - 1] : Completion{};
  }
  std::size_t reserved() const { return reserved_; }
  std::size_t pushed() {
    const std::lock_guard held(mutex_);
    return items_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Completion> items_;
  std::size_t reserved_ = 0;
};

// Records what a connection says, in order.
class Log final : public TransferEvents, public ConnectionEvents {
 public:
  struct Result {
    Code code = Code::kOk;
    std::uint32_t tokens = 0;
    std::string detail;
  };

  void on_source_released(TransferHandle t) override {
    const std::lock_guard held(mutex_);
    CHECK(!results_.contains(t));
    CHECK_EQ(++released_[t], 1);
    changed_.notify_all();
  }
  void on_result(TransferHandle t, Code code, std::uint32_t tokens,
                 const std::string& detail) override {
    const std::lock_guard held(mutex_);
    CHECK_EQ(released_[t], 1);
    CHECK(!results_.contains(t));
    CHECK(!is_lost_);
    results_[t] = {code, tokens, detail};
    changed_.notify_all();
  }
  void on_ready(SendConnection&) override {
    const std::lock_guard held(mutex_);
    ready_ = true;
    changed_.notify_all();
  }
  void on_lost(SendConnection&, Code code, const std::string& detail) override {
    const std::lock_guard held(mutex_);
    CHECK(!is_lost_);
    is_lost_ = true;
    lost_ = {code, 0, detail};
    changed_.notify_all();
  }

  template <class Condition>
  bool until(Condition condition, const char* what) {
    std::unique_lock held(mutex_);
    if (changed_.wait_for(held, kGuard, condition)) return true;
    check::fail(__FILE__, __LINE__, std::string("not seen: ") + what);
    return false;
  }
  bool wait_ready() {
    return until([&] { return ready_ || is_lost_; }, "ready") && ready_;
  }
  Result wait_result(TransferHandle t) {
    until([&] { return results_.contains(t); }, "result");
    return results_[t];
  }
  Result wait_lost() {
    until([&] { return is_lost_; }, "loss");
    return lost_;
  }
  bool released(TransferHandle t) {
    const std::lock_guard held(mutex_);
    return released_.contains(t);
  }
  bool wait_released(TransferHandle t) {
    return until([&] { return released_.contains(t); }, "release");
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ready_ = false;
  bool is_lost_ = false;
  Result lost_;
  std::map<TransferHandle, int> released_;
  std::map<TransferHandle, Result> results_;
};

inline TransferKey key_of(std::uint8_t n) {
  TransferKey key;
  key.bytes.fill(n);
  return key;
}
inline Incarnation incarnation_of(std::uint8_t n) {
  Incarnation id;
  id.bytes.fill(n);
  return id;
}

inline const Incarnation kScheduler = incarnation_of(0xD0);  // D's
inline const Incarnation kSender = incarnation_of(0x50);     // P's scheduler
inline const Incarnation kWorker = incarnation_of(0x57);     // P's worker

inline GrantSpec grant(const TransferKey& key, std::vector<std::uint32_t> blocks,
                       std::uint32_t first, std::uint32_t end,
                       std::vector<std::uint32_t> sources = {0}) {
  GrantSpec spec;
  spec.key = key;
  spec.scheduler_incarnation = kScheduler;
  spec.sender_instance = "p0";
  spec.sender_incarnation = kSender;
  spec.block_ids = {std::move(blocks)};
  spec.first_token = first;
  spec.end_token = end;
  spec.source_ranks = std::move(sources);
  return spec;
}

inline SenderIdentity sender_identity() {
  return {"p0", kWorker, "test"};
}

inline bool read_exactly(int fd, void* to, std::size_t size) {
  auto* at = static_cast<std::uint8_t*>(to);
  while (size > 0) {
    pollfd readable{fd, POLLIN, 0};
    if (poll(&readable, 1, 30'000) <= 0) return false;
    const ssize_t n = recv(fd, at, size, 0);
    if (n <= 0) return false;
    at += n;
    size -= static_cast<std::size_t>(n);
  }
  return true;
}

inline bool read_go(int fd) {
  std::array<std::uint8_t, 9> go{};
  return read_exactly(fd, go.data(), go.size()) && go == wire::kGo;
}

inline std::pair<int, int> socket_pair() {
  int fds[2] = {-1, -1};
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {fds[0], fds[1]};
}

inline Peer peer_of(std::int32_t rank = 0) {
  Peer peer;
  peer.instance = "d0";
  peer.scheduler_incarnation = kScheduler;
  peer.worker_incarnation = incarnation_of(static_cast<std::uint8_t>(0xE0 + rank));
  peer.rank = rank;
  peer.address = "test";
  return peer;
}

// A receiver and a client that dials it through a socket pair.
struct Ends {
  Cache source;
  Cache target;
  std::shared_ptr<Sink> sink = std::make_shared<Sink>();
  std::shared_ptr<Log> log = std::make_shared<Log>();
  Receiver receiver;
  std::unique_ptr<DataClient> client;
  std::shared_ptr<SendConnection> connection;

  explicit Ends(wire::TransportKind kind, const Shape& from = {}, const Shape& to = {},
                std::uint32_t source_rank = 0, std::uint32_t target_rank = 0)
      : source(from, source_rank),
        target(to, target_rank),
        receiver(target.cache, sink, config_of(kind)) {
    source.fill(1);
    target.fill(2);
    DataClientConfig config;
    config.transports = {kind};
    client = std::make_unique<DataClient>(
        source.cache,
        [this](const DialRequest& request) {
          const auto [ours, theirs] = socket_pair();
          CHECK(receiver.adopt(theirs, sender_identity()).ok());
          CHECK(read_go(ours));
          CHECK(client->adopt(request.id, ours).ok());
        },
        config);
  }
  ~Ends() {
    client->close();
    receiver.close();
    CHECK_EQ(sink->reserved(), sink->pushed());  // every owed completion came, none twice
  }

  static ReceiverConfig config_of(wire::TransportKind kind) {
    ReceiverConfig config;
    config.transports = {kind};
    return config;
  }

  bool connect() {
    connection = client->get(peer_of(static_cast<std::int32_t>(target.cache->rank())), log);
    return log->wait_ready();
  }

  Plan plan(const BlockLists& src, const BlockLists& dst, TokenRange tokens, bool last) const {
    return PairPlanner(source.cache->shared_layout(), target.cache->shared_layout())
        .plan(source.cache->rank(), target.cache->rank(), src, dst, tokens, last);
  }

  TransferHandle open(const TransferKey& key, std::uint32_t first, std::uint32_t end,
                      bool crc = false) {
    TransferOpen open;
    open.key = key;
    open.sender_incarnation = kSender;
    open.first_token = first;
    open.end_token = end;
    open.crc = crc;
    return connection->open(open, log);
  }

  void send(TransferHandle t, const Plan& plan, std::uint32_t first, std::uint32_t end) {
    for (const PlanPart& part : plan.parts) {
      const auto runs = std::make_shared<const Runs>(part.runs);
      for (const std::uint16_t layer : part.layers) {
        connection->send_layer(t, {layer, first, end, runs});
      }
    }
  }

  // What the target must look like after `plan` on top of `before`.
  std::vector<std::vector<std::uint8_t>> expected_after(
      const Plan& plan, std::vector<std::vector<std::uint8_t>> before) const {
    for (const PlanPart& part : plan.parts) {
      for (const std::uint16_t layer : part.layers) {
        for (const Run& run : part.runs) {
          std::memcpy(before[layer].data() + run.dst_offset,
                      source.memory[layer].data() + run.src_offset, run.length);
        }
      }
    }
    return before;
  }
};

inline const wire::TransportKind kAllKinds[] = {wire::TransportKind::kTcp,
                                                wire::TransportKind::kCma};

// A sender that the test speaks by hand, honest or not.
struct RawSender {
  Receiver& receiver;
  int fd = -1;
  Shape shape;

  RawSender(Receiver& r, const Shape& s, SenderIdentity identity = sender_identity())
      : receiver(r), shape(s) {
    const auto [ours, theirs] = socket_pair();
    fd = ours;
    CHECK(receiver.adopt(theirs, identity).ok());
    CHECK(read_go(fd));
  }
  ~RawSender() { close(); }
  void close() {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
  void write(const void* data, std::size_t size) {
    CHECK_EQ(::send(fd, data, size, MSG_NOSIGNAL), static_cast<ssize_t>(size));
  }
  void write(const wire::Buffer& frame) { write(frame.data(), frame.size()); }

  wire::Hello hello(std::uint32_t rank = 0) const {
    wire::Hello h;
    h.transports = wire::transport_bit(wire::TransportKind::kTcp);
    h.source_rank = static_cast<std::int32_t>(rank);
    h.layout = shape.layout()->serialize();
    return h;
  }
  void greet(std::uint32_t rank = 0) {
    wire::Buffer out;
    append(out, hello(rank));
    write(out);
    wire::Welcome welcome;
    CHECK(read_frame(wire::kWelcome, &welcome));
    CHECK(welcome.code == Code::kOk);
  }
  void open(std::uint32_t handle, const TransferKey& key, std::uint32_t first, std::uint32_t end,
            std::uint32_t flags = 0, const Incarnation& incarnation = kSender) {
    wire::Buffer out;
    append(out, wire::Open{handle, flags, key, incarnation, first, end});
    write(out);
  }
  // The frame only; its payload is the test's business.
  void blocks(const wire::Chunk& chunk, const Runs& runs) {
    wire::Buffer out;
    append_blocks(out, chunk, runs, 0, runs.size());
    write(out);
  }
  void chunk_end(const wire::Chunk& chunk, std::uint32_t crc = 0) {
    wire::Buffer out;
    append(out, wire::ChunkEnd{chunk, crc});
    write(out);
  }
  void payload(std::size_t size, std::uint8_t value = 0xAB) {
    const std::vector<std::uint8_t> bytes(size, value);
    write(bytes.data(), size);
  }

  bool read_raw(std::uint32_t* head, std::vector<std::uint8_t>* body) {
    std::uint8_t eight[8];
    if (!read_exactly(fd, eight, 8)) return false;
    const wire::FrameHead frame = wire::parse_frame_head(eight);
    *head = frame.head;
    body->resize(frame.length);
    return read_exactly(fd, body->data(), frame.length);
  }
  template <class Frame>
  bool read_frame(std::uint32_t head, Frame* out) {
    std::uint32_t got = 0;
    std::vector<std::uint8_t> body;
    std::string why;
    return read_raw(&got, &body) && got == head && decode(wire::Body(body), out, &why);
  }
  wire::Result done() {
    wire::Result result;
    if (!read_frame(wire::kDone, &result)) check::fail(__FILE__, __LINE__, "no DONE");
    return result;
  }
  bool at_end() {
    std::uint8_t byte = 0;
    return !read_exactly(fd, &byte, 1);
  }
};

}  // namespace data_test
