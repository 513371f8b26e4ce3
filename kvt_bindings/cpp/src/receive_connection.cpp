#include "receive_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvt {
namespace {

constexpr std::size_t kDrainBytes = 256 * 1024;   // per call, into scratch memory
constexpr std::size_t kMaxUnsentBytes = 4 << 20;  // answers that the sender does not read

}  // namespace

ReceiveConnection::ReceiveConnection(std::uint64_t id, Fd socket, SenderIdentity sender,
                                     ReceiverShared* shared)
    : id_(id), socket_(std::move(socket)), sender_(std::move(sender)), shared_(shared) {
  view_.id = id_;
  view_.sender = sender_;
}

ReceiveConnection::~ReceiveConnection() {
  join();
}

void ReceiveConnection::start() {
  thread_ = std::thread([self = shared_from_this()] { self->run(); });
}

void ReceiveConnection::join() {
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

void ReceiveConnection::post(SlotEnd end) {
  {
    const std::lock_guard held(mutex_);
    ended_.push_back(std::move(end));
  }
  wake_.notify();
}

void ReceiveConnection::stop(Code code, const std::string& detail) {
  {
    const std::lock_guard held(mutex_);
    if (!stop_) stop_why_ = {code, detail};
    stop_ = true;
  }
  wake_.notify();
}

ReceiverSnapshot::Connection ReceiveConnection::view() const {
  ReceiverSnapshot::Connection out;
  {
    const std::lock_guard held(mutex_);
    out = view_;
  }
  out.bytes_placed = placed_.load(std::memory_order_relaxed);
  out.bytes_drained = drained_.load(std::memory_order_relaxed);
  out.num_open = num_open_.load(std::memory_order_relaxed);
  return out;
}

void ReceiveConnection::run() {
  try {
    run_frames();
  } catch (const Error& e) {
    give_up(e.code(), e.what());
  } catch (const std::exception& e) {  // out of memory and the like: this connection only
    give_up(Code::kInternal, e.what());
  }
  end_everything();
  over_.store(true, std::memory_order_release);
  shared_->timer.notify();
}

void ReceiveConnection::run_frames() {
  out_.assign(wire::kGo.begin(), wire::kGo.end());
  if (!flush_out()) return;
  const auto handshake_end =
      Clock::now() + std::chrono::milliseconds(shared_->config.handshake_timeout_ms);
  while (true) {
    if (wake_.acknowledge()) {
      Status stop;
      {
        const std::lock_guard held(mutex_);
        if (stop_) stop = stop_why_;
      }
      if (!stop.ok()) {
        give_up(stop.code, stop.detail);
        return;
      }
      collect_ended();
    }
    if (!flush_out()) return;
    const Progress progress = advance();
    if (progress == Progress::kStop) return;
    if (progress == Progress::kMore) continue;
    int timeout_ms = -1;
    if (transport_ == nullptr) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(handshake_end - Clock::now());
      if (left.count() <= 0) {
        give_up(Code::kTimeout, "no greeting within the handshake deadline");
        return;
      }
      timeout_ms = static_cast<int>(left.count());
    }
    if (!wait(timeout_ms)) return;
  }
}

bool ReceiveConnection::wait(int timeout_ms) {
  const bool unsent = out_sent_ < out_.size();
  pollfd fds[2] = {{socket_.get(), static_cast<short>(POLLIN | (unsent ? POLLOUT : 0)), 0},
                   {wake_.fd(), POLLIN, 0}};
  if (wake_.is_pending()) return true;
  if (poll(fds, 2, timeout_ms) < 0 && errno != EINTR) {
    return give_up(Code::kInternal, std::string("poll: ") + std::strerror(errno));
  }
  if ((fds[1].revents & POLLIN) != 0) wake_.drain();
  return true;
}

ReceiveConnection::Progress ReceiveConnection::advance() {
  switch (phase_) {
    case Phase::kHead:
      return read_head();
    case Phase::kBody:
      return read_body();
    case Phase::kPayload:
      return move_payload();
  }
  return Progress::kStop;
}

// kMore once all `want` bytes are there.
ReceiveConnection::Progress ReceiveConnection::fill(std::uint8_t* to, std::size_t want) {
  while (have_ < want) {
    const ssize_t n = recv(socket_.get(), to + have_, want - have_, MSG_DONTWAIT);
    if (n > 0) {
      have_ += static_cast<std::size_t>(n);
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return Progress::kWait;
    } else {
      give_up(Code::kPeerLost, n == 0 ? "the sender closed the connection"
                                      : std::string("receive: ") + std::strerror(errno));
      return Progress::kStop;
    }
  }
  have_ = 0;
  return Progress::kMore;
}

ReceiveConnection::Progress ReceiveConnection::read_head() {
  const Progress progress = fill(head_.data(), head_.size());
  if (progress != Progress::kMore) return progress;
  frame_ = wire::parse_frame_head(head_.data());
  const std::uint32_t limit = wire::max_body_bytes(frame_.head);
  const bool greeting = transport_ == nullptr;
  if (limit == 0 || frame_.length > limit || greeting != (frame_.head == wire::kHello)) {
    shared_->counters.violations.fetch_add(1);
    give_up(Code::kBadRequest, limit == 0              ? "unknown frame"
                               : greeting              ? "KHEL expected first"
                               : frame_.length > limit ? "frame too long"
                                                       : "a second KHEL");
    return Progress::kStop;
  }
  if (body_.size() < frame_.length) body_.resize(frame_.length);
  phase_ = Phase::kBody;
  return Progress::kMore;
}

ReceiveConnection::Progress ReceiveConnection::read_body() {
  const Progress progress = fill(body_.data(), frame_.length);
  if (progress != Progress::kMore) return progress;
  phase_ = Phase::kHead;
  if (!handle(frame_.head)) return Progress::kStop;
  if (frame_.head == wire::kHello) body_ = {};  // megabytes that are not needed again
  return Progress::kMore;
}

bool ReceiveConnection::handle(std::uint32_t head) {
  const wire::Body body(body_.data(), frame_.length);
  switch (head) {
    case wire::kHello:
      return on_hello(body);
    case wire::kOpen:
      return on_open(body);
    case wire::kBlocks:
      return on_blocks(body);
    case wire::kChunkEnd:
      return on_chunk_end(body);
    case wire::kEnd:
      return on_end(body);
    case wire::kCancel:
      return on_cancel(body);
    case wire::kHeld:
      return on_held(body);
    case wire::kFail: {
      wire::Result result;
      std::string why;
      const bool read = wire::decode(body, &result, &why);
      return give_up(Code::kPeerLost,
                     "the sender ended the connection: " + std::string(code_name(result.code)) +
                         ", " + (read ? result.detail : why));
    }
    default:
      shared_->counters.violations.fetch_add(1);
      return give_up(Code::kBadRequest, "a frame that only a receiver sends");
  }
}

ReceiveConnection::Progress ReceiveConnection::move_payload() {
  Carried* carried = incoming_.landing ? find(incoming_.transfer) : nullptr;
  if (carried == nullptr || carried->slot->is_ending()) incoming_.landing = false;
  Step step;
  if (incoming_.landing) {
    const std::unique_lock held = carried->slot->lock();
    if (carried->slot->may_place()) {
      step = placer_->place();
    } else {
      incoming_.landing = false;
    }
  }
  if (incoming_.landing) {
    if (step.bytes > 0) {
      carried->slot->count_placed(step.bytes);
      placed_.fetch_add(step.bytes, std::memory_order_relaxed);
      shared_->counters.bytes_placed.fetch_add(step.bytes, std::memory_order_relaxed);
    }
  } else if (payload_left_ > 0) {
    static thread_local std::vector<std::byte> scratch(kDrainBytes);
    const ssize_t n = recv(socket_.get(), scratch.data(),
                           std::min<std::uint64_t>(payload_left_, scratch.size()), MSG_DONTWAIT);
    if (n > 0) {
      step.bytes = static_cast<std::uint64_t>(n);
      drained_.fetch_add(step.bytes, std::memory_order_relaxed);
      shared_->counters.bytes_drained.fetch_add(step.bytes, std::memory_order_relaxed);
    } else if (n == 0) {
      step = {StepKind::kPeerGone, 0, "the sender closed the connection"};
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      step.kind = StepKind::kWait;
    } else if (errno != EINTR) {
      step = {StepKind::kPeerGone, 0, std::string("receive: ") + std::strerror(errno)};
    }
  }
  if (transport_->carries_payload()) payload_left_ -= step.bytes;
  switch (step.kind) {
    case StepKind::kPeerGone:
      give_up(Code::kPeerLost, step.detail);
      return Progress::kStop;
    case StepKind::kFailed: {
      const std::string what = "layer " + std::to_string(incoming_.layer) + ": " + step.detail;
      fail(*carried, Code::kInternal, what);
      incoming_.landing = false;
      if (!placer_->is_asynchronous()) return Progress::kMore;
      give_up(Code::kInternal, what);  // a device stage that has failed stays failed
      return Progress::kStop;
    }
    case StepKind::kWait:
      return Progress::kWait;
    case StepKind::kMore:
    case StepKind::kDone:
      break;
  }
  const bool done = incoming_.landing ? step.kind == StepKind::kDone : payload_left_ == 0;
  if (done) {
    if (incoming_.landing && carried->crc) carried->chunk_crc = placer_->crc();
    phase_ = Phase::kHead;
  }
  return Progress::kMore;
}

void ReceiveConnection::fail(Carried& carried, Code code, const std::string& detail) {
  (void)shared_->grants.finish(
      *carried.grant, *carried.slot, code, carried.grant->spec.first_token,
      "from rank " + std::to_string(source_rank_) + " of " + sender_.instance + ": " + detail);
}

void ReceiveConnection::violation(Carried& carried, const std::string& detail) {
  shared_->counters.violations.fetch_add(1);
  fail(carried, Code::kBadRequest, detail);
}

bool ReceiveConnection::give_up(Code code, const std::string& detail) {
  if (!end_.ok()) return false;  // the first reason stands
  end_ = {code, detail};
  if (code != Code::kPeerLost) {
    collect_ended();  // results that are known go out first
    wire::Result result;
    result.code = code;
    result.detail = detail;
    wire::append_result(out_, wire::kFail, result);
    // Best effort: whoever broke the rules may not be reading.
    [[maybe_unused]] const auto n = send(socket_.get(), out_.data() + out_sent_,
                                         out_.size() - out_sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  return false;
}

void ReceiveConnection::end_everything() {
  if (end_.ok()) end_ = {Code::kPeerLost, "the connection ended"};
  for (auto& [transfer, carried] : carried_) {
    fail(carried, end_.code,
         end_.detail + ", after " + std::to_string(carried.slot->bytes_placed()) + " bytes");
  }
  carried_.clear();
  num_open_.store(0);
  shutdown(socket_.get(), SHUT_RDWR);
}

ReceiveConnection::Carried* ReceiveConnection::find(std::uint32_t transfer) {
  const auto it = carried_.find(transfer);
  return it == carried_.end() ? nullptr : &it->second;
}

void ReceiveConnection::collect_ended() {
  std::vector<SlotEnd> ended;
  {
    const std::lock_guard held(mutex_);
    ended.swap(ended_);
  }
  for (SlotEnd& end : ended) {
    wire::Result result;
    result.transfer = end.transfer;
    result.code = end.code;
    result.tokens = end.tokens;
    result.detail = std::move(end.detail);
    wire::append_result(out_, wire::kDone, result);
    carried_.erase(end.transfer);
  }
  num_open_.store(carried_.size(), std::memory_order_relaxed);
}

bool ReceiveConnection::flush_out() {
  while (out_sent_ < out_.size()) {
    const ssize_t n = send(socket_.get(), out_.data() + out_sent_, out_.size() - out_sent_,
                           MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      out_sent_ += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (out_.size() - out_sent_ <= kMaxUnsentBytes) return true;
      return give_up(Code::kTimeout, "the sender does not read its results");
    } else if (errno != EINTR) {
      return give_up(Code::kPeerLost, std::string("send: ") + std::strerror(errno));
    }
  }
  out_.clear();
  out_sent_ = 0;
  return true;
}

}  // namespace kvt
