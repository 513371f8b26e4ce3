#include "send_connection.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvt {
namespace {

constexpr std::size_t kInBytes = 64 * 1024;  // read at once; answers are small

const char* state_text(int state) {
  static constexpr const char* kNames[] = {"dialling", "greeting", "ready", "lost"};
  return kNames[state];
}

}  // namespace

SocketSendConnection::SocketSendConnection(std::uint64_t id, Peer peer,
                                           std::shared_ptr<ConnectionEvents> events,
                                           const ClientShared* shared)
    : id_(id), peer_(std::move(peer)), events_(std::move(events)), shared_(shared) {
  last_progress_ = Clock::now();
  thread_ = std::thread([this] { run(); });
}

SocketSendConnection::~SocketSendConnection() {
  {
    const std::lock_guard held(mutex_);
    destroyed_ = true;
  }
  wake_.notify();
  thread_.join();
}

void SocketSendConnection::push(Command command) {
  {
    const std::lock_guard held(mutex_);
    inbox_.push_back(std::move(command));
  }
  wake_.notify();
}

TransferHandle SocketSendConnection::open(const TransferOpen& transfer,
                                          std::shared_ptr<TransferEvents> events) {
  Command command{Command::Kind::kOpen, 0, transfer, std::move(events), {}, {}, -1};
  TransferHandle handle = 0;
  {
    const std::lock_guard held(mutex_);  // numbered and queued as one: handles ascend on the wire
    handle = next_transfer_++;
    command.transfer = handle;
    inbox_.push_back(std::move(command));
  }
  wake_.notify();
  return handle;
}

void SocketSendConnection::send_layer(TransferHandle transfer, LayerSend layer) {
  push({Command::Kind::kLayer, transfer, {}, nullptr, std::move(layer), {}, -1});
}

void SocketSendConnection::end(TransferHandle transfer) {
  push({Command::Kind::kEnd, transfer, {}, nullptr, {}, {}, -1});
}

void SocketSendConnection::cancel(TransferHandle transfer, Code code, std::string detail) {
  push({Command::Kind::kCancel, transfer, {}, nullptr, {}, {code, std::move(detail)}, -1});
}

void SocketSendConnection::close(Code code, std::string detail) {
  push({Command::Kind::kClose, 0, {}, nullptr, {}, {code, std::move(detail)}, -1});
}

Status SocketSendConnection::adopt(Fd socket) {
  if (fcntl(socket.get(), F_GETFD) < 0) return {Code::kBadRequest, "not a descriptor"};
  Command command{Command::Kind::kAdopt, 0, {}, nullptr, {}, {}, -1};
  {
    const std::lock_guard held(mutex_);
    if (is_lost()) return {Code::kNotFound, "the connection was given up meanwhile"};
    command.fd = socket.release();
    inbox_.push_back(std::move(command));
  }
  wake_.notify();
  return {};
}

DataClientSnapshot::Connection SocketSendConnection::view() const {
  DataClientSnapshot::Connection out;
  out.id = id_;
  out.peer = peer_;
  const State state = state_.load(std::memory_order_acquire);
  out.state = state_text(static_cast<int>(state));
  if (state == State::kReady) out.transport = transport_name_;
  out.bytes_sent = payload_sent_.load(std::memory_order_relaxed);
  out.num_open = num_open_.load(std::memory_order_relaxed);
  const std::lock_guard held(mutex_);
  out.note = note_;
  return out;
}

std::string SocketSendConnection::peer_name() const {
  return "rank " + std::to_string(peer_.rank) + " of " + peer_.instance;
}

void SocketSendConnection::run() {
  try {
    while (true) {
      wake_.acknowledge();
      if (!take_commands()) break;
      if (state_ == State::kReady) refill();
      if (!end_.ok()) break;
      if (socket_) {
        if (writable_ && !send_some()) break;
        if (!receive_some()) break;
        const bool more = !items_.empty() || (state_ == State::kReady && !work_.empty());
        if (writable_ && more && end_.ok()) continue;
        if (!end_.ok()) break;
      }
      bool expired = false;
      const int timeout_ms = poll_timeout_ms(&expired);
      if (expired) {
        const bool up = state_ == State::kReady;
        lose(up ? Code::kTimeout : Code::kUnreachable,
             up ? "no progress" : "not connected within the deadline");
        break;
      }
      pollfd fds[2] = {{wake_.fd(), POLLIN, 0}, {socket_.get(), POLLIN, 0}};
      if (!items_.empty()) fds[1].events |= POLLOUT;
      if (wake_.is_pending()) continue;
      if (poll(fds, socket_ ? 2 : 1, timeout_ms) < 0 && errno != EINTR) {
        lose(Code::kInternal, std::string("poll: ") + std::strerror(errno));
        break;
      }
      if ((fds[0].revents & POLLIN) != 0) wake_.drain();
      if ((fds[1].revents & (POLLOUT | POLLERR | POLLHUP)) != 0) writable_ = true;
    }
  } catch (const Error& e) {
    lose(e.code(), e.what());
  } catch (const std::exception& e) {
    lose(Code::kInternal, e.what());
  }
  end_everything();
  linger();
}

// A lost connection still answers: whoever opens a transfer on it hears of the loss.
void SocketSendConnection::linger() {
  while (true) {
    wake_.acknowledge();
    std::vector<Command> commands;
    bool destroyed = false;
    {
      const std::lock_guard held(mutex_);
      destroyed = destroyed_;
      commands.swap(inbox_);
    }
    for (Command& command : commands) {
      if (command.kind == Command::Kind::kAdopt) Fd(command.fd).reset();
      if (command.kind != Command::Kind::kOpen) continue;
      command.events->on_source_released(command.transfer);
      command.events->on_result(command.transfer, end_.code, 0, end_.detail);
    }
    if (destroyed) return;
    pollfd wake{wake_.fd(), POLLIN, 0};
    if (!wake_.is_pending() && poll(&wake, 1, -1) > 0) wake_.drain();
  }
}

void SocketSendConnection::end_everything() {
  if (end_.ok()) end_ = {Code::kPeerLost, "the connection ended"};
  end_.detail = peer_name() + ": " + end_.detail;
  {
    const std::lock_guard held(mutex_);
    lost_.store(true, std::memory_order_release);
    note_ = end_.detail;
  }
  state_.store(State::kLost, std::memory_order_release);
  if (reader_) (void)reader_->cancel();
  items_.clear();
  work_.clear();
  auto transfers = std::move(transfers_);
  transfers_.clear();
  num_open_.store(0);
  for (auto& [handle, transfer] : transfers) {
    release(handle, transfer);
    transfer.events->on_result(handle, end_.code, 0, end_.detail);
  }
  std::vector<Command> rest;  // opened before the loss, not taken yet: on_lost comes last
  {
    const std::lock_guard held(mutex_);
    rest.swap(inbox_);
  }
  for (Command& command : rest) {
    if (command.kind == Command::Kind::kAdopt) Fd(command.fd).reset();
    if (command.kind != Command::Kind::kOpen) continue;
    command.events->on_source_released(command.transfer);
    command.events->on_result(command.transfer, end_.code, 0, end_.detail);
  }
  if (socket_) shutdown(socket_.get(), SHUT_RDWR);
  socket_.reset();
  events_->on_lost(*this, end_.code, end_.detail);
  over_.store(true);
  over_.notify_all();
}

bool SocketSendConnection::lose(Code code, const std::string& detail) {
  if (end_.ok()) end_ = {code, detail};
  return false;
}

int SocketSendConnection::poll_timeout_ms(bool* expired) const {
  std::uint32_t timeout = 0;
  if (state_ != State::kReady) {
    timeout = shared_->config.connect_timeout_ms;
  } else if (!items_.empty() || num_awaiting_ > 0) {
    timeout = shared_->config.progress_timeout_ms;
  } else {
    return -1;
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(
      last_progress_ + std::chrono::milliseconds(timeout) - Clock::now());
  *expired = left.count() <= 0;
  return static_cast<int>(std::max<std::int64_t>(left.count(), 0));
}

bool SocketSendConnection::take_commands() {
  std::vector<Command> commands;
  {
    const std::lock_guard held(mutex_);
    if (destroyed_) return lose(Code::kAborted, "closed");
    commands.swap(inbox_);
  }
  for (std::size_t i = 0; i < commands.size(); ++i) {
    Command& command = commands[i];
    const TransferHandle handle = command.transfer;
    switch (command.kind) {
      case Command::Kind::kOpen: {
        Transfer transfer;
        transfer.events = std::move(command.events);
        transfer.crc = command.open.crc;
        transfer.num_unsent = 1;
        transfers_.emplace(handle, std::move(transfer));
        work_.push_back({Work::Kind::kOpen, handle, command.open, {}, 0, nullptr});
        break;
      }
      case Command::Kind::kLayer: {
        const auto it = transfers_.find(handle);
        if (it == transfers_.end() || it->second.ending) break;
        if (command.layer.runs == nullptr || command.layer.runs->empty()) break;
        ++it->second.num_unsent;
        work_.push_back({Work::Kind::kLayer,
                         handle,
                         {},
                         std::move(command.layer),
                         0,
                         std::make_shared<std::uint32_t>(0)});
        break;
      }
      case Command::Kind::kEnd: {
        const auto it = transfers_.find(handle);
        if (it == transfers_.end() || it->second.ending) break;
        it->second.ending = true;
        ++it->second.num_unsent;
        work_.push_back({Work::Kind::kEnd, handle, {}, {}, 0, nullptr});
        break;
      }
      case Command::Kind::kCancel:
        give_up(handle, command.why.code, command.why.detail, true);
        break;
      case Command::Kind::kClose: {
        const std::lock_guard held(mutex_);  // what came behind it still gets its answer
        inbox_.insert(
            inbox_.begin(),
            std::make_move_iterator(commands.begin() + static_cast<std::ptrdiff_t>(i) + 1),
            std::make_move_iterator(commands.end()));
        return lose(command.why.code, command.why.detail);
      }
      case Command::Kind::kAdopt:
        on_adopt(command.fd);
        break;
    }
  }
  num_open_.store(transfers_.size(), std::memory_order_relaxed);
  return end_.ok();
}

void SocketSendConnection::on_adopt(int fd) {
  Fd socket(fd);
  if (socket_) return;  // a second answer to one dial request
  socket_ = std::move(socket);
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  last_progress_ = Clock::now();
  state_.store(State::kGreeting, std::memory_order_release);
  wire::Hello hello;
  hello.source_rank = static_cast<std::int32_t>(shared_->cache->rank());
  hello.target_rank = peer_.rank;
  hello.layout = shared_->layout_bytes;
  for (const wire::TransportKind kind : shared_->config.transports) {
    if (transport_type(kind).offer(shared_->memory, &hello)) {
      hello.transports |= wire::transport_bit(kind);
    }
  }
  Item item;
  wire::append(item.frame, hello);
  items_.push_back(std::move(item));
}

bool SocketSendConnection::receive_some() {
  if (in_.size() < in_have_ + kInBytes) in_.resize(in_have_ + kInBytes);
  while (true) {
    const ssize_t n =
        recv(socket_.get(), in_.data() + in_have_, in_.size() - in_have_, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (n <= 0) {
      return lose(Code::kPeerLost, n == 0 ? "closed the connection"
                                          : std::string("receive: ") + std::strerror(errno));
    }
    in_have_ += static_cast<std::size_t>(n);
    std::size_t at = 0;
    while (in_have_ - at >= wire::kFrameHeadBytes) {
      const wire::FrameHead head = wire::parse_frame_head(in_.data() + at);
      const std::uint32_t limit = wire::max_body_bytes(head.head);
      if (limit == 0 || head.length > limit) {
        return lose(Code::kBadRequest, "sent an unknown or oversized frame");
      }
      if (in_have_ - at - wire::kFrameHeadBytes < head.length) {
        in_.resize(std::max(in_.size(), at + wire::kFrameHeadBytes + head.length));
        break;
      }
      last_progress_ = Clock::now();
      if (!on_frame(head.head, {in_.data() + at + wire::kFrameHeadBytes, head.length})) {
        return false;
      }
      at += wire::kFrameHeadBytes + head.length;
    }
    in_have_ -= at;
    if (at > 0 && in_have_ > 0) std::memmove(in_.data(), in_.data() + at, in_have_);
  }
}

bool SocketSendConnection::on_frame(std::uint32_t head, wire::Body body) {
  std::string why;
  const bool greeting = state_ == State::kGreeting;
  if (head == wire::kFail) {
    wire::Result result;
    if (!wire::decode(body, &result, &why)) return lose(Code::kBadRequest, why);
    return lose(result.code == Code::kOk ? Code::kPeerLost : result.code,
                "ended the connection: " + result.detail);
  }
  if (greeting != (head == wire::kWelcome))
    return lose(Code::kBadRequest, "sent a misplaced frame");
  switch (head) {
    case wire::kWelcome:
      return on_welcome(body);
    case wire::kDone: {
      wire::Result result;
      if (!wire::decode(body, &result, &why)) return lose(Code::kBadRequest, why);
      on_done(result);
      return true;
    }
    case wire::kAskHeld: {
      std::uint32_t transfer = 0;
      if (!wire::decode_transfer(body, &transfer, &why)) return lose(Code::kBadRequest, why);
      on_ask_held(transfer);
      return true;
    }
    default:
      return lose(Code::kBadRequest, "sent a frame that only a sender sends");
  }
}

bool SocketSendConnection::on_welcome(wire::Body body) {
  wire::Welcome welcome;
  std::string why;
  if (!wire::decode(body, &welcome, &why)) return lose(Code::kBadRequest, why);
  if (welcome.code != Code::kOk) return lose(welcome.code, "refused: " + welcome.detail);
  const auto& offered = shared_->config.transports;
  if (welcome.version != wire::kDataVersion ||
      std::find(offered.begin(), offered.end(), welcome.transport) == offered.end()) {
    return lose(Code::kBadRequest, "chose what was not offered");
  }
  transport_ = &transport_type(welcome.transport);
  if (const std::optional<int> device = shared_->memory.device()) {
    if (!shared_->config.device_memory) {
      return lose(Code::kInternal, "the cache is on a device, no device memory access configured");
    }
    reader_ = shared_->config.device_memory->make_reader(*device);
  }
  peer_layout_ = std::move(welcome.layout);
  transport_name_ = wire::transport_name(welcome.transport);
  {
    const std::lock_guard held(mutex_);
    note_ = welcome.detail;
  }
  state_.store(State::kReady, std::memory_order_release);
  events_->on_ready(*this);
  return true;
}

void SocketSendConnection::on_done(const wire::Result& result) {
  const auto it = transfers_.find(result.transfer);
  if (it == transfers_.end()) return;  // cancelled meanwhile
  if (result.code == Code::kOk) {
    // It cannot have what is not sent, nor (cma) have read without asking afterwards.
    if (is_early(it->second) || (transport_->confirms() && !it->second.released)) {
      give_up(result.transfer, Code::kBadRequest, "the receiver reported success too early", true);
      return;
    }
    release(result.transfer, it->second);
    finish(result.transfer, Code::kOk, result.tokens, {});
    return;
  }
  give_up(result.transfer, result.code, "receiver: " + result.detail, false);
}

// The receiver has read everything. Until now the source was held: else the transfer would have
// been given up and be unknown. One that asks before it was told everything is not believed.
void SocketSendConnection::on_ask_held(TransferHandle transfer) {
  const auto it = transfers_.find(transfer);
  if (it != transfers_.end() && (!transport_->confirms() || is_early(it->second))) {
    give_up(transfer, Code::kBadRequest, "the receiver asked too early", true);
  }
  const bool held = transfers_.contains(transfer);
  Item item;
  wire::append(item.frame, wire::Held{transfer, held});
  items_.push_back(std::move(item));
  if (held) release(transfer, transfers_.at(transfer));
}

// Some chunk has not left yet. (ENDT alone may still wait: full coverage can come before it.)
bool SocketSendConnection::is_early(const Transfer& state) {
  return state.num_unsent > (state.ending ? 1u : 0u);
}

void SocketSendConnection::release(TransferHandle transfer, Transfer& state) {
  if (state.released) return;
  state.released = true;
  state.events->on_source_released(transfer);
}

void SocketSendConnection::finish(TransferHandle transfer, Code code, std::uint32_t tokens,
                                  const std::string& detail) {
  const auto it = transfers_.find(transfer);
  if (it == transfers_.end()) return;
  const auto events = std::move(it->second.events);
  if (it->second.ending && it->second.num_unsent == 0) --num_awaiting_;
  const auto is_its = [transfer](const auto& entry) { return entry.transfer == transfer; };
  std::erase_if(work_, is_its);
  std::erase_if(items_, [&](const Item& item) {
    if (!is_its(item) || item.started()) return false;
    if (item.payload) items_bytes_ -= item.payload->left();
    return true;
  });
  transfers_.erase(it);
  num_open_.store(transfers_.size(), std::memory_order_relaxed);
  events->on_result(transfer, code, tokens, detail);
}

void SocketSendConnection::give_up(TransferHandle transfer, Code code, const std::string& detail,
                                   bool tell_peer) {
  const auto it = transfers_.find(transfer);
  if (it == transfers_.end()) return;
  Transfer& state = it->second;
  bool announced = state.announced;
  for (Item& item : items_) {
    if (item.transfer != transfer || !item.started()) continue;
    announced = true;
    if (!item.payload) continue;
    if (!item.payload->is_host()) (void)reader_->cancel();
    item.filler_left = item.payload->left();
    items_bytes_ -= item.payload->left();
    item.payload.reset();
  }
  release(transfer, state);
  finish(transfer, code, 0, detail);
  if (!announced || !tell_peer) return;
  Item item;
  wire::Result result;
  result.transfer = transfer;
  result.code = code;
  result.detail = detail;
  wire::append_result(item.frame, wire::kCancel, result);
  const auto first_unsent = std::find_if(items_.begin(), items_.end(),
                                         [](const Item& other) { return !other.started(); });
  items_.insert(first_unsent, std::move(item));
}

}  // namespace kvt
