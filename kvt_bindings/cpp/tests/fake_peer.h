// Receivers without sockets, for tests of the sender engine: each connection has a thread that
// copies the runs from the sender's memory into memory of its own when it gets to them, and that
// can be held, refused or lost. The contract is transport.h's.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "kvt/completion_queue.h"
#include "kvt/rank_cache.h"
#include "kvt/transport.h"

namespace fake {

using namespace kvt;

// One tensor (BLOCK, TOKEN, HEAD, DIM) of bytes a layer; `heads` over all ranks.
inline std::shared_ptr<const Layout> layout(std::uint16_t num_layers, std::uint32_t num_blocks,
                                            std::uint32_t block_tokens, std::uint32_t heads,
                                            std::uint32_t dim_bytes, std::uint32_t tp_size) {
  Layout l;
  l.model = "test";
  l.tp_size = tp_size;
  l.groups = {{block_tokens}};
  View v;
  v.name = "kv";
  v.dtype = "u8";
  v.heads_total = heads;
  const std::uint64_t local = heads / tp_size;
  v.dim = {dim_bytes, 1};
  v.head = {local, dim_bytes};
  v.token = {block_tokens, local * dim_bytes};
  v.block = {num_blocks, block_tokens * local * dim_bytes};
  l.patterns = {{{num_blocks * block_tokens * local * dim_bytes}, {v}}};
  for (std::uint16_t i = 0; i < num_layers; ++i) l.layers.push_back({i, 0, 0, 0});
  l.validate();
  return std::make_shared<const Layout>(std::move(l));
}

// Host memory behind one rank of a layout.
struct Memory {
  Memory(std::shared_ptr<const Layout> layout, std::uint32_t rank)
      : bytes(layout->layers.size(),
              std::vector<std::uint8_t>(layout->patterns[0].total_bytes(), 0)) {
    std::vector<LayerMemory> layers;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      layers.push_back({static_cast<std::uint16_t>(i), {{bytes[i].data(), bytes[i].size()}}});
    }
    cache = std::make_shared<const RankCache>(std::move(layout), rank, std::move(layers));
  }
  std::vector<std::vector<std::uint8_t>> bytes;  // by layer
  std::shared_ptr<const RankCache> cache;
};

struct Behaviour {
  bool never_ready = false;
  Status refuse_open;  // the receiver's word on every transfer
  // Called on the connection's thread before each layer is read.
  std::function<void(const LayerSend&)> before_read;
};

class Connection final : public SendConnection {
 public:
  Connection(Peer peer, std::shared_ptr<ConnectionEvents> events,
             std::shared_ptr<const RankCache> source, std::shared_ptr<Memory> target,
             Behaviour behaviour)
      : peer_(std::move(peer)),
        events_(std::move(events)),
        source_(std::move(source)),
        target_(std::move(target)),
        behaviour_(std::move(behaviour)),
        layout_(target_->cache->layout().serialize()),
        thread_([this] { run(); }) {}
  ~Connection() override {
    close(Code::kAborted, "destroyed");
    thread_.join();
  }

  TransferHandle open(const TransferOpen& open, std::shared_ptr<TransferEvents> events) override {
    TransferHandle handle = 0;
    {
      const std::lock_guard lock(mutex_);
      handle = next_++;
    }
    put([this, handle, open, events = std::move(events)] {
      Transfer& t = open_[handle];
      t.events = events;
      t.open = open;
      last_opened_ = handle;
      ++num_opened;
      if (!lost_.ok()) return finish(handle, lost_.code, 0, lost_.detail);
      if (const auto it = cancelled_.find(handle); it != cancelled_.end()) {
        return finish(handle, it->second.code, 0, it->second.detail);
      }
      if (!behaviour_.refuse_open.ok()) {
        finish(handle, behaviour_.refuse_open.code, 0, behaviour_.refuse_open.detail);
      }
    });
    return handle;
  }
  void send_layer(TransferHandle handle, LayerSend layer) override {
    put([this, handle, layer = std::move(layer)] {
      const auto it = open_.find(handle);
      if (it == open_.end()) return;
      CHECK(!it->second.ended);
      if (behaviour_.before_read) behaviour_.before_read(layer);
      copy(layer);
      it->second.end_token = std::max(it->second.end_token, layer.end_token);
    });
  }
  void end(TransferHandle handle) override {
    put([this, handle] {
      const auto it = open_.find(handle);
      if (it == open_.end()) return;
      CHECK(!it->second.ended);
      it->second.ended = true;
      finish(handle, Code::kOk, it->second.end_token, "");
    });
  }
  void cancel(TransferHandle handle, Code code, std::string detail) override {
    put(
        [this, handle, code, detail = std::move(detail)] {
          if (open_.contains(handle)) return finish(handle, code, 0, detail);
          if (handle > last_opened_) cancelled_[handle] = {code, detail};  // it overtook the open
        },
        true);
  }
  void close(Code code, std::string detail) override {
    put([this, code, detail = std::move(detail)] { lose({code, detail}); }, true);
  }
  const std::vector<std::uint8_t>& peer_layout() const override { return layout_; }
  std::string_view transport() const override { return "fake"; }

  const Peer& peer() const { return peer_; }
  bool is_lost() const {
    const std::lock_guard lock(mutex_);
    return is_lost_;
  }
  // While held the thread does nothing but cancels and closes.
  void hold(bool on) {
    {
      const std::lock_guard lock(mutex_);
      held_ = on;
    }
    changed_.notify_all();
  }
  std::atomic<std::size_t> num_opened{0};

 private:
  struct Transfer {
    std::shared_ptr<TransferEvents> events;
    TransferOpen open;
    std::uint32_t end_token = 0;
    bool ended = false;
  };

  void put(std::function<void()> command, bool urgent = false) {
    {
      const std::lock_guard lock(mutex_);
      (urgent ? urgent_ : queue_).push_back(std::move(command));
    }
    changed_.notify_all();
  }
  void run() {
    if (!behaviour_.never_ready) events_->on_ready(*this);
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !urgent_.empty() || (!queue_.empty() && !held_); });
      auto& from = urgent_.empty() ? queue_ : urgent_;
      const auto command = std::move(from.front());
      from.pop_front();
      lock.unlock();
      command();
      lock.lock();
      if (is_lost_ && queue_.empty() && urgent_.empty()) return;
    }
  }
  void copy(const LayerSend& layer) {
    for (const Run& run : *layer.runs) {
      std::uint64_t at = run.dst_offset;
      const bool inside = source_->resolve(
          layer.layer, run.src_offset, run.length, [&](std::uint8_t* from, std::uint64_t n) {
            target_->cache->resolve(layer.layer, at, n, [&](std::uint8_t* to, std::uint64_t m) {
              std::memcpy(to, from, m);
              from += m;
            });
            at += n;
          });
      CHECK(inside);
    }
  }
  void finish(TransferHandle handle, Code code, std::uint32_t tokens, const std::string& detail) {
    const auto it = open_.find(handle);
    if (it == open_.end()) return;
    const auto events = it->second.events;
    open_.erase(it);
    events->on_source_released(handle);
    events->on_result(handle, code, tokens, detail);
  }
  void lose(const Status& why) {
    if (!lost_.ok()) return;
    lost_ = why;
    {
      const std::lock_guard lock(mutex_);
      is_lost_ = true;
      held_ = false;
    }
    std::vector<TransferHandle> handles;
    for (const auto& [handle, transfer] : open_) handles.push_back(handle);
    for (const auto handle : handles) finish(handle, why.code, 0, why.detail);
    events_->on_lost(*this, why.code, why.detail);
  }

  const Peer peer_;
  const std::shared_ptr<ConnectionEvents> events_;
  const std::shared_ptr<const RankCache> source_;
  const std::shared_ptr<Memory> target_;
  const Behaviour behaviour_;
  const std::vector<std::uint8_t> layout_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::deque<std::function<void()>> urgent_;
  TransferHandle next_ = 1;
  bool held_ = false;
  bool is_lost_ = false;
  Status lost_;                                 // the thread's own
  TransferHandle last_opened_ = 0;              // the thread's own
  std::map<TransferHandle, Status> cancelled_;  // the thread's own
  std::map<TransferHandle, Transfer> open_;     // the thread's own
  std::thread thread_;
};

class Connections final : public SendConnections {
 public:
  explicit Connections(std::shared_ptr<const RankCache> source) : source_(std::move(source)) {}

  std::shared_ptr<SendConnection> get(const Peer& peer,
                                      std::shared_ptr<ConnectionEvents> events) override {
    const std::lock_guard lock(mutex_);
    for (const auto& c : all_) {
      if (c->peer() == peer && !c->is_lost()) return c;
    }
    all_.push_back(std::make_shared<Connection>(peer, std::move(events), source_,
                                                targets_.at(peer.rank), behaviours_[peer.rank]));
    return all_.back();
  }
  void drop_peer(const Incarnation& worker, Code code, const std::string& detail) override {
    const std::lock_guard lock(mutex_);
    for (const auto& c : all_) {
      if (c->peer().worker_incarnation == worker) c->close(code, detail);
    }
  }
  void close() override {
    std::vector<std::shared_ptr<Connection>> all;
    {
      const std::lock_guard lock(mutex_);
      all.swap(all_);
    }
    for (const auto& c : all) c->close(Code::kAborted, "closed");
  }

  void add_target(std::int32_t rank, std::shared_ptr<Memory> memory, Behaviour behaviour = {}) {
    targets_[rank] = std::move(memory);
    behaviours_[rank] = std::move(behaviour);
  }
  std::shared_ptr<Connection> latest() const {
    const std::lock_guard lock(mutex_);
    return all_.empty() ? nullptr : all_.back();
  }

 private:
  const std::shared_ptr<const RankCache> source_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Connection>> all_;
  std::map<std::int32_t, std::shared_ptr<Memory>> targets_;
  std::map<std::int32_t, Behaviour> behaviours_;
};

// Collects completions and keeps count of promises.
class Sink final : public CompletionSink {
 public:
  explicit Sink(std::size_t room = 1 << 20) : room_(room) {}
  bool reserve(std::size_t n) override {
    const std::lock_guard lock(mutex_);
    if (reserved_ + n > room_) return false;
    reserved_ += n;
    return true;
  }
  void release(std::size_t n) override {
    const std::lock_guard lock(mutex_);
    CHECK(reserved_ >= n);
    reserved_ -= n;
  }
  void push(Completion completion) override {
    {
      const std::lock_guard lock(mutex_);
      CHECK(reserved_ > 0);
      --reserved_;
      all_.push_back(std::move(completion));
    }
    changed_.notify_all();
  }
  // Waits until there are `n` in all.
  std::vector<Completion> wait(std::size_t n) {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::seconds(60), [&] { return all_.size() >= n; }));
    return all_;
  }
  std::vector<Completion> all() const {
    const std::lock_guard lock(mutex_);
    return all_;
  }
  std::size_t reserved() const {
    const std::lock_guard lock(mutex_);
    return reserved_;
  }

 private:
  const std::size_t room_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t reserved_ = 0;
  std::vector<Completion> all_;
};

}  // namespace fake
