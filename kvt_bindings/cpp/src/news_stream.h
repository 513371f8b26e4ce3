// The rules of a news stream, without I/O, clock or lock: what the sending end keeps until it is
// acknowledged, and which numbers the receiving end takes. The same rules as simple_rpc's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "kvt/ids.h"
#include "kvt/msgpack.h"

namespace kvt::news {

inline constexpr std::size_t kMaxItemBytes = 2 * 1024 * 1024;
inline constexpr std::size_t kMaxFrameItems = 8192;
inline constexpr std::size_t kMaxFrameBytes = 1024 * 1024;  // unless one item is longer
inline constexpr std::uint64_t kMaxSeq = (std::uint64_t{1} << 63) - 1;

// The sending end. Items are numbered from 1; at most one frame is in flight.
class Outgoing {
 public:
  struct Attached {
    bool is_new = false;
    std::uint64_t num_dropped = 0;
  };

  void append(std::uint32_t head, std::vector<std::uint8_t> item);

  // A connection stands to `receiver`, which expects `next_seq`. `is_fresh`: it has no memory of
  // this stream. Items meant for another incarnation are dropped. Throws BAD_REQUEST, with nothing
  // changed, for a number that was never sent.
  Attached attach(const Incarnation& receiver, std::uint64_t next_seq, bool is_fresh);
  // What attach() would find: nothing that was meant for the receiver before is meant for this one.
  bool is_new(const Incarnation& receiver, std::uint64_t next_seq, bool is_fresh) const {
    return receiver_ != receiver || is_fresh || next_seq < first_seq_;
  }
  void detach() { attached_ = false, in_flight_ = 0; }
  // The receiver is gone for good. Returns how many unacknowledged items that drops.
  std::uint64_t drop_all();

  // The body of the next NEWS frame, then in flight; none while one is, if idle or detached.
  std::optional<std::vector<std::uint8_t>> next_frame();
  bool has_frame() const { return attached_ && in_flight_ == 0 && !unacked_.empty(); }
  // Returns the number of items settled. Throws BAD_REQUEST for numbers not in flight.
  std::uint64_t acknowledge(std::uint64_t next_seq);

  std::size_t num_unacked() const { return unacked_.size(); }
  std::size_t num_in_flight() const { return in_flight_; }
  const std::optional<Incarnation>& receiver() const { return receiver_; }
  std::uint64_t frames() const { return frames_; }
  std::uint64_t resent() const { return resent_; }

 private:
  struct Item {
    std::uint32_t head;
    std::vector<std::uint8_t> packed;
  };
  void settle(std::uint64_t n);

  std::deque<Item> unacked_;
  std::uint64_t first_seq_ = 1;  // of the oldest unacknowledged
  std::uint64_t sent_seq_ = 1;   // one above the highest number ever sent to this receiver
  std::size_t in_flight_ = 0;
  bool attached_ = false;
  std::optional<Incarnation> receiver_;
  std::uint64_t frames_ = 0;
  std::uint64_t resent_ = 0;
};

// One item as it lies in the frame's body.
struct IncomingItem {
  std::uint32_t head;
  std::span<const std::uint8_t> packed;
};

// The receiving end.
class Incoming {
 public:
  struct Frame {
    std::vector<IncomingItem> items;  // those not delivered before, in order
    std::uint64_t duplicates = 0;
  };

  // Checks a whole NEWS body. Everything returned must be delivered: it is not returned again.
  // Throws BAD_REQUEST for a malformed body or a gap, with nothing accepted.
  Frame accept(std::span<const std::uint8_t> body);

  std::uint64_t expected_seq() const { return expected_seq_; }
  void reset() { expected_seq_ = 1; }

 private:
  std::uint64_t expected_seq_ = 1;
};

}  // namespace kvt::news
