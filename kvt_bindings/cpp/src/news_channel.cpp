#include "kvt/news_channel.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "fd.h"
#include "kvt/bytes.h"
#include "news_connection.h"
#include "news_stream.h"

namespace kvt {
namespace {

using news::Clock;
using news::Lost;
using std::chrono::milliseconds;

constexpr std::uint32_t kMissedBeats = 3;

StreamId random_stream_id() {
  std::random_device random;
  StreamId id;
  for (std::size_t i = 0; i < 16; i += 4) {
    const std::uint32_t word = random();
    std::memcpy(id.bytes.data() + i, &word, 4);
  }
  return id;
}

}  // namespace

class NewsChannel::Impl {
 public:
  explicit Impl(NewsChannelConfig config)
      : config_(std::move(config)), stream_id_(random_stream_id()) {
    if (config_.attributes.empty()) config_.attributes = {0x80};
  }

  ~Impl() { stop(); }

  void on(std::uint32_t head, Handler handler) {
    if (thread_.joinable()) throw Error(Code::kBadRequest, "news channel: started already");
    if (!handlers_.emplace(head, std::move(handler)).second) {
      throw Error(Code::kBadRequest, "news channel: this head has a handler");
    }
  }

  void on_peer_ended(std::function<void(const Incarnation&)> callback) {
    if (thread_.joinable()) throw Error(Code::kBadRequest, "news channel: started already");
    if (peer_ended_) {  // the sender and the receiver both want to know
      callback = [first = std::move(peer_ended_),
                  second = std::move(callback)](const Incarnation& incarnation) {
        first(incarnation);
        second(incarnation);
      };
    }
    peer_ended_ = std::move(callback);
  }

  void start() {
    if (thread_.joinable() || stopping_) return;
    thread_ = std::thread([this] { run(); });
  }

  void attach(int fd, const Incarnation& peer) {
    Fd owned(fd);
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      pending_fd_ = std::move(owned);
      pending_peer_ = peer;
    }
    wake_.notify();
  }

  void end_peer(const std::string& detail) {
    {
      const std::lock_guard lock(mutex_);
      end_peer_ = detail;
    }
    wake_.notify();
  }

  bool reserve(std::size_t n) {
    const std::lock_guard lock(mutex_);
    const std::size_t used = reserved_ + out_.num_unacked();
    if (stopping_ || used > config_.max_slots || n > config_.max_slots - used) return false;
    reserved_ += n;
    return true;
  }

  void release(std::size_t n) {
    const std::lock_guard lock(mutex_);
    reserved_ -= std::min(n, reserved_);
  }

  void publish(std::uint32_t head, std::vector<std::uint8_t> item) {
    if (item.size() > news::kMaxItemBytes) {
      throw Error(Code::kBadRequest, "news item of " + std::to_string(item.size()) + " bytes");
    }
    bool wake = false;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) {
        ++stats_.dropped;
        return;
      }
      if (reserved_ > 0) {
        --reserved_;
      } else {
        ++stats_.published_unreserved;
      }
      ++stats_.published;
      out_.append(head, std::move(item));
      // While a frame is in flight its acknowledgement will fetch this one too.
      wake = out_.has_frame() && std::this_thread::get_id() != thread_id_;
    }
    if (wake) wake_.notify();
  }

  void push(Completion c) {
    msgpack::Writer w;
    const bool has_stamps = c.stamps_ns[0] != 0;
    w.array(has_stamps ? 7 : 6);
    w.uint(config_.rank);
    w.id16(c.key);
    w.uint(c.other_rank);
    w.uint(c.tokens);
    w.uint(static_cast<std::uint8_t>(c.code));
    w.str(std::string_view(c.detail).substr(0, 1024));
    if (has_stamps) {
      w.array(c.stamps_ns.size());
      for (const std::uint64_t stamp : c.stamps_ns) w.uint(stamp);
    }
    publish(c.kind == Completion::Kind::kSendDone ? head("SDON") : head("LDON"), w.take());
  }

  bool flush(std::uint32_t timeout_ms) {
    std::unique_lock lock(mutex_);
    return flushed_.wait_for(lock, milliseconds(timeout_ms), [&] {
      return out_.num_unacked() == 0 || stopping_;
    }) && out_.num_unacked() == 0;
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify();
    flushed_.notify_all();
    if (thread_.joinable()) thread_.join();
    const std::lock_guard lock(mutex_);
    pending_fd_.reset();
  }

  int event_fd() const { return event_wake_.fd(); }

  std::vector<NewsChannelEvent> take_events() {
    const std::lock_guard lock(mutex_);
    event_wake_.drain();
    (void)event_wake_.acknowledge();
    return std::exchange(events_, {});
  }

  Stats stats() const {
    const std::lock_guard lock(mutex_);
    Stats s = stats_;
    s.reserved = reserved_;
    s.unacked = out_.num_unacked();
    s.frames_sent = out_.frames();
    s.items_resent = out_.resent();
    return s;
  }

 private:
  // -- everything below: the channel's thread only, except what mutex_ guards

  void run() {
    {
      const std::lock_guard lock(mutex_);
      thread_id_ = std::this_thread::get_id();
    }
    while (true) {
      (void)wake_.acknowledge();
      std::optional<std::string> ended;
      Fd fd;
      Incarnation peer;
      {
        const std::lock_guard lock(mutex_);
        if (stopping_) break;
        ended = std::exchange(end_peer_, std::nullopt);
        fd = std::move(pending_fd_);
        peer = pending_peer_;
      }
      if (ended) {
        lose({Code::kPeerLost, *ended, false});
        end_peer_now();
      }
      if (fd) open(std::move(fd), peer);
      try {
        if (connection_) pump();
      } catch (const Lost& lost) {
        lose(lost);
      } catch (const Error& e) {
        lose({e.code(), e.what(), true});
      } catch (const std::exception& e) {
        lose({Code::kInternal, e.what(), true});
      }
      wait();
    }
    if (connection_) {
      lose({Code::kAborted, "the worker closed its channel", true});
    }
  }

  // Begins LINK on a new connection; what comes next depends on the answer.
  void open(Fd fd, const Incarnation& peer) {
    lose({Code::kPeerLost, "replaced by a newer connection", false});
    connection_.emplace(std::move(fd));
    peer_ = peer;
    linked_ = false;
    link_due_ = Clock::now() + milliseconds(config_.link_timeout_ms);
    ack_due_ = Clock::time_point::max();
    msgpack::Writer w;
    w.array(2);
    w.uint(config_.link_timeout_ms);
    w.array(5);
    w.str(config_.kind);
    w.id16(stream_id_);
    w.uint(incoming_.expected_seq());
    w.uint(config_.heartbeat_ms);
    w.raw(config_.attributes);
    connection_->queue(head("LINK"), w.bytes());
  }

  // Reads, writes and keeps time once, as far as it goes without waiting.
  void pump() {
    connection_->read(
        [this](std::uint32_t kind, std::span<const std::uint8_t> body) { take_frame(kind, body); });
    if (linked_) {
      keep_time();
      send_news();
    } else if (Clock::now() >= link_due_) {
      throw Lost{Code::kTimeout, "the scheduler did not answer LINK", false};
    }
    connection_->write();
    if (connection_->is_over()) {
      throw Lost{Code::kPeerLost, "the scheduler closed the connection", false};
    }
  }

  void take_frame(std::uint32_t kind, std::span<const std::uint8_t> body) {
    msgpack::Reader r(body);
    if (kind == head("FAIL")) {
      (void)r.array("FAIL", 16);
      const Code code = code_from_wire(r.uint("FAIL.code"));
      throw Lost{code, std::string(r.str("FAIL.message", 4096)), false};
    }
    if (!linked_) {
      if (kind != head("OKAY")) throw Error(Code::kBadRequest, "LINK: expected OKAY or FAIL");
      return take_link_answer(r);
    }
    if (kind == head("NEWS")) {
      take_news(body);
    } else if (kind == head("ACKN")) {
      if (r.array("ACKN", 16) < 1) throw Error(Code::kBadRequest, "ACKN: expected a number");
      const std::uint64_t next = r.uint("ACKN.next_seq", news::kMaxSeq);
      const std::lock_guard lock(mutex_);
      stats_.acked += out_.acknowledge(next);
      if (out_.num_in_flight() == 0) ack_due_ = Clock::time_point::max();
      if (out_.num_unacked() == 0) flushed_.notify_all();
    } else if (kind == head("BEAT")) {
      (void)r.array("BEAT", 16);
    } else {
      throw Error(Code::kBadRequest, "a frame that no channel has");
    }
  }

  void take_link_answer(msgpack::Reader r) {
    const std::size_t fields = r.array("LINK.answer", 16);
    if (fields < 2) throw Error(Code::kBadRequest, "LINK.answer: expected 2 fields");
    const auto stream = r.id16<StreamId>("LINK.stream_id");
    const std::uint64_t next = r.uint("LINK.next_seq", news::kMaxSeq);
    bool fresh = false;
    if (fields > 2) {
      for (std::size_t n = r.map("LINK.attributes", 64); n > 0; --n) {
        const auto name = r.str("LINK.attribute", 256);
        msgpack::Reader value(r.skip("LINK.attribute"));
        if (name == "fresh") fresh = value.boolean("LINK.fresh");
      }
    }
    std::optional<Incarnation> over;
    {
      const std::lock_guard lock(mutex_);
      if (out_.is_new(peer_, next, fresh)) over = out_.receiver();
    }
    // What its end causes to be published is dropped: it is no news to the next one.
    if (over) tell_peer_ended(*over);
    if (stream != peer_stream_) incoming_.reset();
    peer_stream_ = stream;
    const std::lock_guard lock(mutex_);
    const auto attached = out_.attach(peer_, next, fresh);
    linked_ = true;
    known_peer_ = peer_;
    stats_.attached = true;
    stats_.peer = peer_;
    ++stats_.attaches;
    stats_.dropped += attached.num_dropped;
    NewsChannelEvent event;
    event.is_new_peer = attached.is_new;
    event.num_dropped = attached.num_dropped;
    event.peer = peer_;
    tell(std::move(event));
  }

  void take_news(std::span<const std::uint8_t> body) {
    const news::Incoming before = incoming_;
    const news::Incoming::Frame got = incoming_.accept(body);
    for (const auto& item : got.items) {
      if (!handlers_.contains(item.head)) {
        incoming_ = before;  // no item of the frame reached a handler
        throw Error(Code::kBadRequest, "NEWS: a head that is not known here");
      }
    }
    {
      const std::lock_guard lock(mutex_);
      stats_.received += got.items.size();
      stats_.duplicates += got.duplicates;
    }
    for (const auto& item : got.items) handlers_.at(item.head)(msgpack::Reader(item.packed));
    msgpack::Writer w;
    w.array(1);
    w.uint(incoming_.expected_seq());
    connection_->queue(head("ACKN"), w.bytes());
  }

  void send_news() {
    std::optional<std::vector<std::uint8_t>> body;
    {
      const std::lock_guard lock(mutex_);
      body = out_.next_frame();
    }
    if (!body) return;
    connection_->queue(head("NEWS"), *body);
    ack_due_ = Clock::now() + milliseconds(config_.ack_timeout_ms);
  }

  void keep_time() {
    const auto now = Clock::now();
    if (now >= ack_due_) throw Lost{Code::kTimeout, "the scheduler does not acknowledge", true};
    if (config_.heartbeat_ms == 0) return;
    const milliseconds interval(config_.heartbeat_ms);
    // A look that comes late by an interval or more means that this thread did not listen: beats
    // may lie unread, or both processes stood still. One more interval, once, as simple_rpc gives
    // it.
    if (now >= silence_due()) {
      if (now - expected_ >= interval && graced_ != connection_->last_received()) {
        graced_ = connection_->last_received();
        grace_end_ = now + interval;
      }
    }
    if (now >= silence_due()) {
      throw Lost{Code::kPeerLost, "the scheduler has been silent for three heartbeats", true};
    }
    if (now - connection_->last_sent() >= interval)
      connection_->queue(head("BEAT"), std::array<std::uint8_t, 1>{0x90});
  }

  // When the peer counts as lost if nothing arrives until then.
  Clock::time_point silence_due() const {
    if (graced_ == connection_->last_received()) return grace_end_;
    return connection_->last_received() + kMissedBeats * milliseconds(config_.heartbeat_ms);
  }

  // Until there is something to do: a frame, room to write, a wake-up, a deadline.
  void wait() {
    if (wake_.is_pending()) return;
    pollfd fds[2] = {{wake_.fd(), POLLIN, 0}, {connection_ ? connection_->fd() : -1, POLLIN, 0}};
    if (connection_ && connection_->wants_to_write()) fds[1].events |= POLLOUT;
    auto due = Clock::time_point::max();
    if (connection_ && !linked_) due = link_due_;
    if (connection_ && linked_) {
      due = ack_due_;
      if (config_.heartbeat_ms != 0) {
        const milliseconds interval(config_.heartbeat_ms);
        due = std::min({due, connection_->last_sent() + interval, silence_due()});
      }
    }
    int timeout_ms = -1;
    if (due != Clock::time_point::max()) {
      const auto left = std::chrono::ceil<milliseconds>(due - Clock::now()).count();
      timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
    }
    expected_ = due;
    (void)::poll(fds, connection_ ? 2 : 1, timeout_ms);
    if ((fds[0].revents & POLLIN) != 0) wake_.drain();
  }

  // The connection is over: tell Python, keep the streams for the next one.
  void lose(const Lost& lost) {
    if (!connection_) return;
    if (lost.tell) {
      msgpack::Writer w;
      w.array(3);
      w.uint(static_cast<std::uint8_t>(lost.code));
      w.str(std::string_view(lost.detail).substr(0, 1024));
      w.map(0);
      connection_->queue(head("FAIL"), w.bytes());
      try {
        connection_->write();  // best effort
      } catch (const Lost&) {
      }
    }
    connection_.reset();
    linked_ = false;
    const std::lock_guard lock(mutex_);
    out_.detach();
    stats_.attached = false;
    if (lost.code == Code::kBadRequest || lost.code == Code::kInternal) ++stats_.violations;
    NewsChannelEvent event;
    event.kind = NewsChannelEvent::Kind::kDetached;
    event.peer = peer_;
    event.code = lost.code;
    event.detail = lost.detail;
    tell(std::move(event));
  }

  void end_peer_now() {
    if (const auto peer = std::exchange(known_peer_, std::nullopt)) tell_peer_ended(*peer);
    const std::lock_guard lock(mutex_);
    stats_.dropped += out_.drop_all();
    flushed_.notify_all();
  }

  void tell_peer_ended(const Incarnation& peer) {
    if (peer_ended_) peer_ended_(peer);
  }

  void tell(NewsChannelEvent event) {  // mutex_ held
    events_.push_back(std::move(event));
    event_wake_.notify();
  }

  NewsChannelConfig config_;
  const StreamId stream_id_;
  std::map<std::uint32_t, Handler> handlers_;
  std::function<void(const Incarnation&)> peer_ended_;
  WakeUp wake_;
  WakeUp event_wake_;
  std::thread thread_;

  mutable std::mutex mutex_;
  std::condition_variable flushed_;
  std::thread::id thread_id_;
  news::Outgoing out_;
  std::size_t reserved_ = 0;
  Fd pending_fd_;
  Incarnation pending_peer_;
  std::optional<std::string> end_peer_;
  bool stopping_ = false;
  std::vector<NewsChannelEvent> events_;
  Stats stats_;

  // The channel's thread only.
  std::optional<news::Connection> connection_;
  Incarnation peer_;
  std::optional<Incarnation> known_peer_;
  StreamId peer_stream_;
  bool linked_ = false;
  news::Incoming incoming_;
  Clock::time_point link_due_, ack_due_;
  Clock::time_point expected_ = Clock::time_point::max();  // when this thread must look again
  Clock::time_point graced_ = Clock::time_point::min();    // the last_received() that was graced
  Clock::time_point grace_end_;
};

NewsChannel::NewsChannel(NewsChannelConfig config)
    : impl_(std::make_unique<Impl>(std::move(config))) {}
NewsChannel::~NewsChannel() = default;
void NewsChannel::on(const char (&letters)[5], Handler handler) {
  impl_->on(head(letters), std::move(handler));
}
void NewsChannel::on_peer_ended(std::function<void(const Incarnation&)> callback) {
  impl_->on_peer_ended(std::move(callback));
}
void NewsChannel::start() {
  impl_->start();
}
void NewsChannel::attach(int fd, const Incarnation& peer) {
  impl_->attach(fd, peer);
}
void NewsChannel::end_peer(const std::string& detail) {
  impl_->end_peer(detail);
}
void NewsChannel::publish(const char (&letters)[5], std::vector<std::uint8_t> item) {
  impl_->publish(head(letters), std::move(item));
}
bool NewsChannel::reserve(std::size_t n) {
  return impl_->reserve(n);
}
void NewsChannel::release(std::size_t n) {
  impl_->release(n);
}
void NewsChannel::push(Completion completion) {
  impl_->push(std::move(completion));
}
bool NewsChannel::flush(std::uint32_t timeout_ms) {
  return impl_->flush(timeout_ms);
}
void NewsChannel::stop() {
  impl_->stop();
}
int NewsChannel::event_fd() const {
  return impl_->event_fd();
}
std::vector<NewsChannelEvent> NewsChannel::take_events() {
  return impl_->take_events();
}
NewsChannel::Stats NewsChannel::stats() const {
  return impl_->stats();
}

}  // namespace kvt
