// The channel against a scripted scheduler at the other end of a socket pair, and the pure parts
// under it.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "fd.h"
#include "kvt/bytes.h"
#include "kvt/news_channel.h"
#include "news_stream.h"

using namespace kvt;

namespace {

Incarnation incarnation(std::uint8_t n) {
  Incarnation id;
  id.bytes.fill(n);
  return id;
}

struct Frame {
  std::string head;
  std::vector<std::uint8_t> body;
};

// The scheduler's end: blocking, with a bound that only a hang reaches.
class Scheduler {
 public:
  explicit Scheduler(NewsChannel& channel, const Incarnation& self) {
    int fds[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    fd_.reset(fds[0]);
    channel.attach(fds[1], self);
  }

  // Any frame but BEAT; head "" at the end of the connection.
  Frame next() {
    while (true) {
      std::uint8_t header[8];
      if (!read_exactly(header, 8)) return {};
      Frame f{std::string(reinterpret_cast<char*>(header), 4),
              std::vector<std::uint8_t>(load_le<std::uint32_t>(header + 4))};
      if (!read_exactly(f.body.data(), f.body.size())) return {};
      if (f.head != "BEAT") return f;
    }
  }

  void send(const char (&letters)[5], const std::vector<std::uint8_t>& body) {
    std::vector<std::uint8_t> out;
    append_le(out, head(letters));
    append_le(out, static_cast<std::uint32_t>(body.size()));
    out.insert(out.end(), body.begin(), body.end());
    CHECK(::send(fd_.get(), out.data(), out.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(out.size()));
  }

  // Reads LINK, answers OKAY; returns the next_seq that the worker asked for.
  std::uint64_t link(std::uint8_t stream, std::uint64_t next_seq, bool fresh) {
    const Frame f = next();
    REQUIRE(f.head == "LINK");
    msgpack::Reader r(f.body);
    REQUIRE(r.array("", 9) == 2);
    CHECK_EQ(r.uint(""), 3000u);
    REQUIRE(r.array("", 9) == 5);
    CHECK_EQ(r.str("", 99), "worker");
    CHECK_EQ(r.bin("", 99).size(), 16u);
    const std::uint64_t wanted = r.uint("");
    msgpack::Writer w;
    w.array(3);
    w.id16(incarnation(stream));
    w.uint(next_seq);
    w.map(1);
    w.str("fresh");
    w.boolean(fresh);
    send("OKAY", w.bytes());
    return wanted;
  }

  void ack(std::uint64_t next_seq) {
    msgpack::Writer w;
    w.array(1);
    w.uint(next_seq);
    send("ACKN", w.bytes());
  }

  void news(std::uint64_t first, const char (&letters)[5], std::vector<std::uint64_t> items) {
    msgpack::Writer w;
    w.array(2);
    w.uint(first);
    w.array(1);
    w.array(2);
    w.str({letters, 4});
    w.array(items.size());
    for (const auto i : items) w.uint(i);
    send("NEWS", w.bytes());
  }

  void hang_up() { fd_.reset(); }

 private:
  bool read_exactly(std::uint8_t* to, std::size_t n) {
    while (n > 0) {
      pollfd p{fd_.get(), POLLIN, 0};
      REQUIRE(::poll(&p, 1, 20'000) == 1);
      const ssize_t got = ::recv(fd_.get(), to, n, 0);
      if (got <= 0) return false;
      to += got;
      n -= static_cast<std::size_t>(got);
    }
    return true;
  }
  Fd fd_;
};

// (first number, items' first fields) of a NEWS frame of one-element arrays or plain numbers.
std::pair<std::uint64_t, std::vector<std::uint64_t>> numbers(const Frame& f) {
  REQUIRE(f.head == "NEWS");
  msgpack::Reader r(f.body);
  (void)r.array("", 9);
  std::pair<std::uint64_t, std::vector<std::uint64_t>> out{r.uint(""), {}};
  for (std::size_t g = r.array("", 99); g > 0; --g) {
    (void)r.array("", 2);
    (void)r.str("", 4);
    for (std::size_t n = r.array("", 9999); n > 0; --n) out.second.push_back(r.uint(""));
  }
  return out;
}

std::vector<std::uint8_t> packed(std::uint64_t n) {
  msgpack::Writer w;
  w.uint(n);
  return w.take();
}

// A channel and those of its events that the test has not looked at.
struct Channel : NewsChannel {
  using NewsChannel::NewsChannel;
  std::deque<NewsChannelEvent> events;
};

NewsChannelEvent event_of(Channel& channel) {
  while (channel.events.empty()) {
    pollfd p{channel.event_fd(), POLLIN, 0};
    REQUIRE(::poll(&p, 1, 20'000) == 1);
    for (auto& e : channel.take_events()) channel.events.push_back(std::move(e));
  }
  NewsChannelEvent e = channel.events.front();
  channel.events.pop_front();
  return e;
}

NewsChannelConfig quiet() {
  NewsChannelConfig c;
  c.heartbeat_ms = 0;
  return c;
}

using Numbers = std::vector<std::uint64_t>;

}  // namespace

TEST(one_frame_in_flight_and_the_rest_in_the_next) {
  Channel channel(quiet());
  channel.start();
  Scheduler s(channel, incarnation(1));
  CHECK_EQ(s.link(7, 1, true), 1u);
  CHECK(event_of(channel).is_new_peer);
  channel.publish("ITEM", packed(10));
  CHECK(numbers(s.next()) == std::pair(std::uint64_t{1}, Numbers{10}));
  for (std::uint64_t n = 11; n < 15; ++n) channel.publish("ITEM", packed(n));
  s.ack(2);
  CHECK(numbers(s.next()) == std::pair(std::uint64_t{2}, Numbers{11, 12, 13, 14}));
  CHECK(!channel.flush(1));
  s.ack(6);
  CHECK(channel.flush(20'000));
  CHECK_EQ(channel.stats().frames_sent, 2u);
}

TEST(unacknowledged_news_is_resent_under_its_numbers) {
  Channel channel(quiet());
  channel.start();
  {
    Scheduler s(channel, incarnation(1));
    (void)s.link(7, 1, true);
    (void)event_of(channel);
    channel.publish("ITEM", packed(10));
    (void)s.next();
    channel.publish("ITEM", packed(11));
    s.hang_up();
    CHECK(event_of(channel).code == Code::kPeerLost);
  }
  channel.publish("ITEM", packed(12));
  Scheduler s(channel, incarnation(1));
  CHECK_EQ(s.link(7, 1, false), 1u);  // it had not come through
  CHECK(numbers(s.next()) == std::pair(std::uint64_t{1}, Numbers{10, 11, 12}));
  CHECK(!event_of(channel).is_new_peer);
  CHECK_EQ(channel.stats().items_resent, 1u);
}

TEST(what_came_through_is_not_sent_twice) {
  Channel channel(quiet());
  channel.start();
  {
    Scheduler s(channel, incarnation(1));
    (void)s.link(7, 1, true);
    (void)event_of(channel);
    channel.publish("ITEM", packed(10));
    (void)s.next();
    s.hang_up();  // taken, but the acknowledgement was lost
    (void)event_of(channel);
  }
  channel.publish("ITEM", packed(11));
  Scheduler s(channel, incarnation(1));
  (void)s.link(7, 2, false);
  CHECK(numbers(s.next()) == std::pair(std::uint64_t{2}, Numbers{11}));
}

TEST(incoming_items_arrive_once_and_gaps_end_the_connection) {
  Channel channel(quiet());
  Numbers got;
  channel.on("ITEM", [&](msgpack::Reader item) { got.push_back(item.uint("item")); });
  channel.start();
  Scheduler s(channel, incarnation(1));
  (void)s.link(7, 1, true);
  s.news(1, "ITEM", {1, 2, 3});
  CHECK_EQ(s.next().head, "ACKN");
  s.news(2, "ITEM", {2, 3, 4});  // two of them for the second time
  const Frame ack = s.next();
  msgpack::Reader r(ack.body);
  (void)r.array("", 1);
  CHECK_EQ(r.uint(""), 5u);
  s.news(7, "ITEM", {7});
  const Frame fail = s.next();
  CHECK_EQ(fail.head, "FAIL");
  msgpack::Reader f(fail.body);
  (void)f.array("", 3);
  CHECK_EQ(f.uint(""), static_cast<std::uint64_t>(Code::kBadRequest));
  CHECK_EQ(s.next().head, "");
  channel.stop();
  CHECK(got == (Numbers{1, 2, 3, 4}));
  CHECK_EQ(channel.stats().duplicates, 2u);
  CHECK_EQ(channel.stats().violations, 1u);
}

TEST(answers_keep_the_order_of_what_they_answer) {
  Channel channel(quiet());
  channel.on("GRNT",
             [&](msgpack::Reader item) { channel.publish("GACK", packed(item.uint("grant"))); });
  channel.start();
  Scheduler s(channel, incarnation(1));
  (void)s.link(7, 1, true);
  s.news(1, "GRNT", {5, 4, 3});
  Numbers answered;
  bool acked = false;
  while (answered.size() < 3 || !acked) {
    const Frame f = s.next();
    if (f.head == "ACKN") {
      acked = true;
      continue;
    }
    const auto [first, items] = numbers(f);
    answered.insert(answered.end(), items.begin(), items.end());
    s.ack(first + items.size());
  }
  CHECK(answered == (Numbers{5, 4, 3}));
}

TEST(a_handler_that_refuses_ends_the_connection_by_name) {
  Channel channel(quiet());
  channel.on("GRNT", [&](msgpack::Reader item) { (void)item.str("grant", 3); });
  channel.start();
  Scheduler s(channel, incarnation(1));
  (void)s.link(7, 1, true);
  (void)event_of(channel);
  s.news(1, "GRNT", {5});
  CHECK_EQ(s.next().head, "FAIL");
  const auto e = event_of(channel);
  CHECK(e.code == Code::kBadRequest);
  CHECK(e.detail.find("grant: expected text") != std::string::npos);
}

TEST(a_new_incarnation_ends_the_old_one_first) {
  Channel channel(quiet());
  std::vector<std::string> told;  // the channel's thread only, until stop()
  channel.on("ITEM", [&](msgpack::Reader item) {
    told.push_back("item " + std::to_string(item.uint("item")));
  });
  channel.on_peer_ended([&](const Incarnation& id) {
    told.push_back("ended " + std::to_string(id.bytes[0]));
    channel.publish("LDON", packed(99));  // as closing its grants does: dropped with the rest
  });
  channel.start();
  {
    Scheduler s(channel, incarnation(1));
    (void)s.link(7, 1, true);
    (void)event_of(channel);
    channel.publish("ITEM", packed(10));
    (void)s.next();
    s.hang_up();
    (void)event_of(channel);
  }
  Scheduler s(channel, incarnation(2));
  CHECK_EQ(s.link(8, 1, true), 1u);
  s.news(1, "ITEM", {1});
  CHECK_EQ(s.next().head, "ACKN");
  const auto e = event_of(channel);
  CHECK(e.is_new_peer);
  CHECK_EQ(e.num_dropped, 2u);
  channel.publish("ITEM", packed(12));
  CHECK(numbers(s.next()) == std::pair(std::uint64_t{1}, Numbers{12}));
  channel.end_peer("its process is gone");
  CHECK_EQ(s.next().head, "");
  CHECK(event_of(channel).code == Code::kPeerLost);
  channel.stop();
  CHECK(told == (std::vector<std::string>{"ended 1", "item 1", "ended 2"}));
}

TEST(silence_and_missing_acknowledgements_are_noticed) {
  NewsChannelConfig config;
  config.heartbeat_ms = 20;
  Channel beating(config);
  beating.start();
  Scheduler s(beating, incarnation(1));
  (void)s.link(7, 1, true);
  (void)event_of(beating);
  CHECK(event_of(beating).code == Code::kPeerLost);

  config.heartbeat_ms = 0;
  config.ack_timeout_ms = 30;
  Channel waiting(config);
  waiting.start();
  Scheduler t(waiting, incarnation(1));
  (void)t.link(7, 1, true);
  (void)event_of(waiting);
  waiting.publish("ITEM", packed(1));
  CHECK(event_of(waiting).code == Code::kTimeout);

  config.link_timeout_ms = 30;
  Channel linking(config);
  linking.start();
  Scheduler u(linking, incarnation(1));
  CHECK(event_of(linking).code == Code::kTimeout);
}

TEST(a_thread_that_did_not_listen_hears_what_was_sent_meanwhile) {
  NewsChannelConfig config;
  config.heartbeat_ms = 20;
  Channel channel(config);
  std::promise<void> is_busy, is_sent;
  channel.on("ITEM", [&](msgpack::Reader item) {
    if (item.uint("item") != 1) return;
    is_busy.set_value();
    is_sent.get_future().wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // ten heartbeats
  });
  channel.start();
  Scheduler s(channel, incarnation(1));
  (void)s.link(7, 1, true);
  (void)event_of(channel);
  s.news(1, "ITEM", {1});
  is_busy.get_future().wait();
  s.news(2, "ITEM", {2});  // lies unread until the first one's handler is done
  is_sent.set_value();
  CHECK_EQ(s.next().head, "ACKN");
  CHECK_EQ(s.next().head, "ACKN");
  CHECK(event_of(channel).code == Code::kPeerLost);  // now it is silence
}

TEST(completions_are_items_and_slots_are_bounded) {
  NewsChannelConfig config = quiet();
  config.rank = 3;
  config.max_slots = 2;
  Channel channel(config);
  channel.start();
  CHECK(channel.reserve(2));
  CHECK(!channel.reserve(1));
  Completion c;
  c.kind = Completion::Kind::kLoadDone;
  c.key.bytes.fill(9);
  c.other_rank = 5;
  c.tokens = 1000;
  c.code = Code::kPeerLost;
  c.detail = "gone";
  channel.push(c);
  CHECK(!channel.reserve(1));  // held until acknowledged
  channel.release(1);
  CHECK(channel.reserve(1));
  Scheduler s(channel, incarnation(1));
  (void)s.link(7, 1, true);
  const Frame f = s.next();
  msgpack::Reader r(f.body);
  (void)r.array("", 2);
  CHECK_EQ(r.uint(""), 1u);
  (void)r.array("", 1);
  (void)r.array("", 2);
  CHECK_EQ(r.str("", 4), "LDON");
  (void)r.array("", 1);
  REQUIRE(r.array("", 9) == 6);
  CHECK_EQ(r.uint(""), 3u);
  CHECK(r.id16<TransferKey>("") == c.key);
  CHECK_EQ(r.uint(""), 5u);
  CHECK_EQ(r.uint(""), 1000u);
  CHECK_EQ(r.uint(""), 9u);
  CHECK_EQ(r.str("", 99), "gone");
  CHECK(r.at_end());
}

TEST(many_threads_publish_through_many_connections) {
  Channel channel(quiet());
  channel.start();
  constexpr int kThreads = 3;
  constexpr std::uint64_t kEach = 3000;
  std::vector<std::thread> producers;
  std::atomic<int> running{kThreads};
  for (std::uint64_t t = 0; t < kThreads; ++t) {
    producers.emplace_back([&, t] {
      for (std::uint64_t n = 0; n < kEach; ++n) channel.publish("ITEM", packed(t * kEach + n));
      running.fetch_sub(1);
    });
  }
  Numbers next(kThreads);
  std::uint64_t expected = 1;
  std::uint64_t total = 0;
  bool fresh = true;
  while (total < kThreads * kEach) {
    Scheduler s(channel, incarnation(1));
    (void)s.link(7, expected, fresh);
    fresh = false;
    for (int frames = 0; frames < 5 && total < kThreads * kEach; ++frames) {
      const Frame f = s.next();
      if (f.head.empty()) break;
      const auto [first, items] = numbers(f);
      CHECK_EQ(first, expected);
      for (const std::uint64_t item : items) {
        CHECK_EQ(item % kEach, next[item / kEach]++);
        ++total;
      }
      expected += items.size();
      if (frames < 4) s.ack(expected);  // the fifth acknowledgement is lost with its connection
    }
  }
  for (auto& p : producers) p.join();
  CHECK_EQ(total, kThreads * kEach);
}

TEST(garbage_ends_the_connection_and_nothing_else) {
  Channel channel(quiet());
  std::uint64_t got = 0;
  channel.on("ITEM", [&](msgpack::Reader item) {
    (void)item.skip("item");
    ++got;
  });
  channel.start();
  std::mt19937 rng(5);
  const char* const heads[] = {"NEWS", "ACKN", "BEAT", "OKAY", "FAIL", "LINK", "????"};
  for (int round = 0; round < 300; ++round) {
    Scheduler s(channel, incarnation(1));
    if (round % 3 != 0) (void)s.link(7, 1, true);  // else: garbage for an answer to LINK
    msgpack::Writer w;                             // now and then almost right
    if (round % 2 == 0) {
      w.array(2);
      w.uint(rng() % 3);
      w.array(1);
      w.array(2);
      w.str("ITEM");
      w.array(rng() % 3);
    }
    std::vector<std::uint8_t> body = w.take();
    for (std::size_t n = rng() % 20; n > 0; --n) body.push_back(static_cast<std::uint8_t>(rng()));
    char letters[5];
    std::memcpy(letters, heads[rng() % std::size(heads)], 5);
    s.send(letters, body);
    s.hang_up();
  }
  Scheduler s(channel, incarnation(2));
  (void)s.link(8, 1, true);
  s.news(1, "ITEM", {1});
  CHECK_EQ(s.next().head, "ACKN");
  channel.stop();
  CHECK(got >= 1);
}

TEST(stop_is_prompt_and_publishing_after_it_harmless) {
  Channel channel(quiet());
  channel.start();
  Scheduler s(channel, incarnation(1));
  (void)s.link(7, 1, true);
  (void)event_of(channel);
  channel.stop();
  CHECK_EQ(s.next().head, "FAIL");
  channel.publish("ITEM", packed(1));
  CHECK_EQ(channel.stats().dropped, 1u);
  CHECK(!channel.reserve(1));
  int fds[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  channel.attach(fds[1], incarnation(1));  // closed at once
  char byte = 0;
  CHECK_EQ(::recv(fds[0], &byte, 1, 0), 0);
  ::close(fds[0]);
}

TEST(streams_refuse_numbers_that_cannot_be) {
  news::Outgoing out;
  out.append(head("ITEM"), packed(1));
  (void)out.attach(incarnation(1), 1, true);
  CHECK_THROWS(Error, out.acknowledge(2));  // nothing in flight
  CHECK(out.next_frame().has_value());
  CHECK_THROWS(Error, out.acknowledge(3));
  CHECK_EQ(out.acknowledge(2), 1u);
  CHECK_EQ(out.acknowledge(1), 0u);  // an old one
  out.detach();
  CHECK_THROWS(Error, out.attach(incarnation(1), 5, false));  // never sent
  CHECK(out.attach(incarnation(1), 1, false).is_new);  // it went back: not the receiver we knew
}
