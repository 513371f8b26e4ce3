// The sender's end of one data connection: a queue that anybody fills and a thread that turns it
// into frames and gathers payload straight from cache memory into the socket.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fd.h"
#include "kvt/data_client.h"
#include "kvt/memory.h"
#include "transports/transport_type.h"

namespace kvt {

using Clock = std::chrono::steady_clock;

// What all connections of a DataClient share; outlives them.
struct ClientShared {
  ClientShared(std::shared_ptr<const RankCache> cache_in, DataClientConfig config_in)
      : cache(std::move(cache_in)),
        memory(registry_of(*cache)),
        config(std::move(config_in)),
        layout_bytes(cache->layout().serialize()) {}

  const std::shared_ptr<const RankCache> cache;
  const MemoryRegistry memory;
  const DataClientConfig config;
  const std::vector<std::uint8_t> layout_bytes;
};

class SocketSendConnection final : public SendConnection {
 public:
  SocketSendConnection(std::uint64_t id, Peer peer, std::shared_ptr<ConnectionEvents> events,
                       const ClientShared* shared);
  // Ends the thread. Not to be run on it: DataClient drops the last reference.
  ~SocketSendConnection() override;

  TransferHandle open(const TransferOpen& transfer,
                      std::shared_ptr<TransferEvents> events) override;
  void send_layer(TransferHandle transfer, LayerSend layer) override;
  void end(TransferHandle transfer) override;
  void cancel(TransferHandle transfer, Code code, std::string detail) override;
  void close(Code code, std::string detail) override;
  const std::vector<std::uint8_t>& peer_layout() const override { return peer_layout_; }
  std::string_view transport() const override { return transport_name_; }

  Status adopt(Fd socket);
  std::uint64_t id() const { return id_; }
  const Peer& peer() const { return peer_; }
  bool is_lost() const { return lost_.load(std::memory_order_acquire); }
  // Returns when on_lost has been called. Not from a callback.
  void wait_until_over() const { over_.wait(false); }
  DataClientSnapshot::Connection view() const;

 private:
  struct Command {
    enum class Kind { kOpen, kLayer, kEnd, kCancel, kClose, kAdopt } kind;
    TransferHandle transfer = 0;
    TransferOpen open;
    std::shared_ptr<TransferEvents> events;
    LayerSend layer;
    Status why;
    int fd = -1;
  };

  // One opened transfer; the thread's own.
  struct Transfer {
    std::shared_ptr<TransferEvents> events;
    bool crc = false;
    bool announced = false;  // some byte of its OPEN may have left
    bool ending = false;     // the engine has called end()
    bool released = false;
    std::size_t num_unsent = 0;  // work entries and items
  };

  // Not yet turned into frames.
  struct Work {
    enum class Kind { kOpen, kLayer, kEnd } kind;
    TransferHandle transfer = 0;
    TransferOpen open;
    LayerSend layer;
    std::size_t next_run = 0;
    std::shared_ptr<std::uint32_t> crc;  // of the chunk so far
  };

  // A frame, with the payload that follows it.
  struct Item {
    TransferHandle transfer = 0;
    wire::Buffer frame;
    std::size_t frame_sent = 0;
    std::unique_ptr<Payload> payload;
    std::uint64_t filler_left = 0;       // instead of a payload that was given up half way
    std::shared_ptr<std::uint32_t> crc;  // payload: where to leave it; LAYR: where to find it
    bool is_chunk_end = false;
    bool is_open = false;
    bool payload_begun = false;  // device

    bool started() const { return frame_sent > 0; }
    bool finished() const {
      return frame_sent == frame.size() && filler_left == 0 && (!payload || payload->left() == 0);
    }
  };

  enum class State : std::uint8_t { kDialling, kGreeting, kReady, kLost };

  void push(Command command);
  void run();
  void linger();
  bool take_commands();
  void on_adopt(int fd);
  void refill();
  bool expand(Work& work);
  bool expand_layer(Work& work);
  bool send_some();
  bool gather(std::vector<iovec>* pieces);
  void sent(std::uint64_t bytes);
  bool receive_some();
  bool on_frame(std::uint32_t head, wire::Body body);
  bool on_welcome(wire::Body body);
  void on_done(const wire::Result& result);
  void on_ask_held(TransferHandle transfer);
  static bool is_early(const Transfer& state);
  // Drops what is queued for it; what is half way goes on as filler. Then tells the engine.
  void give_up(TransferHandle transfer, Code code, const std::string& detail, bool tell_peer);
  void release(TransferHandle transfer, Transfer& state);
  void finish(TransferHandle transfer, Code code, std::uint32_t tokens, const std::string& detail);
  void one_unsent_less(TransferHandle transfer, bool was_open);
  std::uint32_t checksum_runs(std::uint16_t layer, const Runs& runs, std::size_t first,
                              std::size_t count, std::uint32_t crc) const;
  bool lose(Code code, const std::string& detail);  // always false
  void end_everything();
  int poll_timeout_ms(bool* expired) const;
  std::string peer_name() const;

  const std::uint64_t id_;
  const Peer peer_;
  const std::shared_ptr<ConnectionEvents> events_;
  const ClientShared* const shared_;
  WakeUp wake_;
  std::atomic<bool> lost_{false};  // takes no more transfers
  std::atomic<bool> over_{false};  // and has told everybody
  std::atomic<State> state_{State::kDialling};
  std::atomic<std::uint64_t> payload_sent_{0};
  std::atomic<std::size_t> num_open_{0};

  mutable std::mutex mutex_;  // of the queue
  std::vector<Command> inbox_;
  TransferHandle next_transfer_ = 1;
  bool destroyed_ = false;
  std::string note_;

  // The thread's own; peer_layout_ and transport_name_ are fixed before on_ready.
  Fd socket_;
  std::vector<std::uint8_t> peer_layout_;
  std::string_view transport_name_;
  const TransportType* transport_ = nullptr;
  std::unique_ptr<DeviceReader> reader_;
  std::unordered_map<TransferHandle, Transfer> transfers_;
  std::deque<Work> work_;
  std::deque<Item> items_;
  std::uint64_t items_bytes_ = 0;  // payload queued in items_
  std::vector<iovec> pieces_;
  bool writable_ = true;  // no EAGAIN since poll last said so
  std::vector<std::uint8_t> in_;
  std::size_t in_have_ = 0;
  std::size_t num_awaiting_ = 0;  // all sent, result outstanding
  Clock::time_point last_progress_;
  Status end_;

  std::thread thread_;
};

}  // namespace kvt
