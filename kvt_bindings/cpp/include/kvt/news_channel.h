// The worker's end of its channel to its scheduler: news both ways, from native threads, without
// the GIL. The wire is simple_rpc's (docs/news.md); this end always is the opener.
//
// Python connects, shakes hands (HELLO, AUTH) and gives the descriptor to attach(); LINK and all
// that follows is done here, on one thread of the channel's own. When a connection is lost Python
// is told (take_events) and attaches another: nothing acknowledged is sent twice, nothing
// unacknowledged is lost, as long as it is the same scheduler incarnation and it still knows us.
// If not, its life is over for us: what was unacknowledged is dropped and `on_peer_ended` called.
//
// Contract. on(), set callbacks: before start(). Handlers and callbacks run on the channel's
// thread, in the order of the wire; they may publish, must not block, and must not call stop().
// reserve, release, publish: any thread, never block. attach, end_peer, stop, flush: any thread of
// the embedder. After stop() publish is ignored and counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvt/code.h"
#include "kvt/completion_queue.h"
#include "kvt/ids.h"
#include "kvt/msgpack.h"

namespace kvt {

struct NewsChannelConfig {
  std::string kind = "worker";
  std::uint32_t rank = 0;             // own rank, in every completion's item
  std::uint32_t heartbeat_ms = 1000;  // 0: none
  std::uint32_t link_timeout_ms = 3000;
  std::uint32_t ack_timeout_ms = 30000;
  std::size_t max_slots = 1 << 16;       // reserved and unacknowledged items together
  std::vector<std::uint8_t> attributes;  // packed msgpack map for LINK; empty: {}
};

// What Python wants to know, drained in order.
struct NewsChannelEvent {
  enum class Kind : std::uint8_t { kAttached = 0, kDetached = 1 };
  Kind kind = Kind::kAttached;
  bool is_new_peer = false;       // attached: the scheduler had no memory of this stream
  std::uint64_t num_dropped = 0;  // attached: unacknowledged items of the old incarnation
  Incarnation peer;
  Code code = Code::kOk;  // detached: why
  std::string detail;
};

class NewsChannel : public CompletionSink {
 public:
  // One item of news; the reader spans exactly its bytes. Error(BAD_REQUEST) ends the connection
  // with a FAIL; anything else is INTERNAL.
  using Handler = std::function<void(msgpack::Reader item)>;

  explicit NewsChannel(NewsChannelConfig config = {});
  ~NewsChannel() override;  // stops
  NewsChannel(const NewsChannel&) = delete;
  NewsChannel& operator=(const NewsChannel&) = delete;

  // Takes news of this head, e.g. "GRNT". BAD_REQUEST if it is taken or the channel was started.
  void on(const char (&head)[5], Handler handler);
  // A scheduler incarnation is over: another one attached, the same one forgot us, or end_peer().
  // Called before anything of the next one is delivered; several callbacks in the order given.
  void on_peer_ended(std::function<void(const Incarnation&)> callback);

  void start();

  // Takes the descriptor over (and closes it whatever happens). An attachment that stands is
  // dropped for it.
  void attach(int fd, const Incarnation& peer);

  // The embedder knows that the scheduler is gone for good: drops connection and unacknowledged
  // news, and calls on_peer_ended.
  void end_peer(const std::string& detail);

  // Sends one packed item. Uses up a reserved slot; without one it is still sent, and counted
  // (answers such as GACK are bounded by what the scheduler sent).
  void publish(const char (&head)[5], std::vector<std::uint8_t> item);

  // CompletionSink: push() publishes LDON or SDON `[rank, key, other_rank, tokens, code, detail]`.
  [[nodiscard]] bool reserve(std::size_t n) override;
  void release(std::size_t n) override;
  void push(Completion completion) override;

  // Waits until all that was published is acknowledged. False after `timeout_ms`.
  bool flush(std::uint32_t timeout_ms);

  // Sends FAIL(ABORTED), closes, joins. Idempotent. Handlers do not run any more after it.
  void stop();

  // Readable when events wait; owned by the channel.
  int event_fd() const;
  std::vector<NewsChannelEvent> take_events();

  struct Stats {
    bool attached = false;
    Incarnation peer;
    std::uint64_t reserved = 0;
    std::uint64_t unacked = 0;
    std::uint64_t published = 0;
    std::uint64_t published_unreserved = 0;
    std::uint64_t acked = 0;
    std::uint64_t frames_sent = 0;
    std::uint64_t items_resent = 0;
    std::uint64_t dropped = 0;  // old incarnation's, or after stop
    std::uint64_t received = 0;
    std::uint64_t duplicates = 0;
    std::uint64_t violations = 0;
    std::uint64_t attaches = 0;
  };
  Stats stats() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvt
