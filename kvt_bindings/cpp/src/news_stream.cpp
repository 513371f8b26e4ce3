#include "news_stream.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvt/bytes.h"

namespace kvt::news {
namespace {

[[noreturn]] void violation(const std::string& what) {
  throw Error(Code::kBadRequest, what);
}

}  // namespace

void Outgoing::append(std::uint32_t head, std::vector<std::uint8_t> item) {
  unacked_.push_back({head, std::move(item)});
}

Outgoing::Attached Outgoing::attach(const Incarnation& receiver, std::uint64_t next_seq,
                                    bool is_fresh) {
  if (next_seq < 1 || next_seq > kMaxSeq) violation("next_seq out of range");
  Attached result;
  const bool is_first = !receiver_.has_value();
  result.is_new = is_new(receiver, next_seq, is_fresh);
  if (!result.is_new && next_seq > sent_seq_) {
    violation("next_seq: the peer expects " + std::to_string(next_seq) + ", only numbers below " +
              std::to_string(sent_seq_) + " were sent");
  }
  if (result.is_new) {
    // What waits for the very first receiver is meant for it.
    if (!is_first) result.num_dropped = drop_all();
    first_seq_ = sent_seq_ = next_seq;
  } else {
    settle(next_seq - first_seq_);
  }
  receiver_ = receiver;
  in_flight_ = 0;
  attached_ = true;
  return result;
}

std::uint64_t Outgoing::drop_all() {
  const std::uint64_t n = unacked_.size();
  unacked_.clear();
  first_seq_ += n;
  in_flight_ = 0;
  return n;
}

std::optional<std::vector<std::uint8_t>> Outgoing::next_frame() {
  if (!has_frame()) return std::nullopt;
  std::size_t count = 0;
  std::size_t bytes = 0;
  std::vector<std::size_t> groups;  // items in each run of the same head
  for (const Item& item : unacked_) {
    if (count == kMaxFrameItems || (count > 0 && bytes + item.packed.size() > kMaxFrameBytes))
      break;
    if (count == 0 || unacked_[count - 1].head != item.head) groups.push_back(0);
    ++groups.back();
    ++count;
    bytes += item.packed.size();
  }
  msgpack::Writer w;
  w.array(2);
  w.uint(first_seq_);
  w.array(groups.size());
  std::size_t at = 0;
  for (const std::size_t n : groups) {
    char letters[4];
    store_le(letters, unacked_[at].head);
    w.array(2);
    w.str({letters, 4});
    w.array(n);
    for (const std::size_t end = at + n; at < end; ++at) w.raw(unacked_[at].packed);
  }
  in_flight_ = count;
  ++frames_;
  resent_ += std::min<std::uint64_t>(count, sent_seq_ - first_seq_);
  sent_seq_ = std::max(sent_seq_, first_seq_ + count);
  return w.take();
}

std::uint64_t Outgoing::acknowledge(std::uint64_t next_seq) {
  if (next_seq > first_seq_ + in_flight_) {
    violation("ACKN: expected at most " + std::to_string(first_seq_ + in_flight_) + ", got " +
              std::to_string(next_seq));
  }
  if (next_seq <= first_seq_) return 0;
  const std::uint64_t n = next_seq - first_seq_;
  in_flight_ -= n;
  settle(n);
  return n;
}

void Outgoing::settle(std::uint64_t n) {
  unacked_.erase(unacked_.begin(), unacked_.begin() + static_cast<std::ptrdiff_t>(n));
  first_seq_ += n;
}

Incoming::Frame Incoming::accept(std::span<const std::uint8_t> body) {
  msgpack::Reader r(body);
  if (r.array("NEWS", 16) < 2) violation("NEWS: expected first_seq and groups");
  const std::uint64_t first = r.uint("NEWS.first_seq", kMaxSeq);
  if (first < 1) violation("NEWS.first_seq: expected at least 1");
  std::vector<IncomingItem> items;
  for (std::size_t groups = r.array("NEWS.groups", kMaxFrameItems); groups > 0; --groups) {
    if (r.array("NEWS.group", 2) != 2) violation("NEWS.group: expected a head and items");
    const std::string_view letters = r.str("NEWS.head", 4);
    if (letters.size() != 4) violation("NEWS.head: expected 4 letters");
    const std::size_t n = r.array("NEWS.items", kMaxFrameItems - items.size());
    if (n == 0) violation("NEWS.items: expected at least one");
    for (std::size_t i = 0; i < n; ++i) {
      items.push_back({load_le<std::uint32_t>(letters.data()), r.skip("NEWS.item")});
    }
  }
  if (items.empty() || items.size() > kMaxSeq - first) violation("NEWS: no items, or too many");
  if (first > expected_seq_) {
    violation("NEWS: expected number " + std::to_string(expected_seq_) + " or lower, got " +
              std::to_string(first));
  }
  Frame frame;
  frame.duplicates = std::min<std::uint64_t>(expected_seq_ - first, items.size());
  items.erase(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(frame.duplicates));
  expected_seq_ += items.size();
  frame.items = std::move(items);
  return frame;
}

}  // namespace kvt::news
