// A receiver that breaks the rules: every transfer still ends once, and the sender goes on.
#include "data_fixture.h"

using namespace data_test;

namespace {

// The receiving end of a connection, by hand; cma is chosen with the sender's own word for it.
struct RawReceiver {
  Cache source{Shape{}};
  std::shared_ptr<Log> log = std::make_shared<Log>();
  int fd = -1;
  DataClient client;
  std::shared_ptr<SendConnection> connection;

  RawReceiver() : client(source.cache, [this](const DialRequest& r) { dial(r); }) {
    connection = client.get(peer_of(), log);
    wire::Hello hello;
    CHECK(read_frame(wire::kHello, &hello));
    CHECK_EQ(hello.transports, 3u);
  }
  ~RawReceiver() {
    client.close();
    if (fd >= 0) ::close(fd);
  }
  void dial(const DialRequest& request) {
    const auto [theirs, ours] = socket_pair();
    fd = ours;
    CHECK(client.adopt(request.id, theirs).ok());
  }
  void write(const wire::Buffer& frame) {
    CHECK_EQ(::send(fd, frame.data(), frame.size(), MSG_NOSIGNAL),
             static_cast<ssize_t>(frame.size()));
  }
  void welcome(wire::TransportKind kind) {
    wire::Buffer out;
    append(out, wire::Welcome{Code::kOk, wire::kDataVersion, kind, "",
                              source.shape.layout()->serialize()});
    write(out);
  }
  TransferHandle open(std::uint8_t key) {
    TransferOpen open;
    open.key = key_of(key);
    open.sender_incarnation = kSender;
    return connection->open(open, log);
  }
  void send_layer(TransferHandle t, std::uint16_t layer) {
    const Plan plan = PairPlanner(source.shape.layout(), source.shape.layout())
                          .plan(0, 0, {{1, 2}}, {{3, 4}}, {0, 8}, true);
    connection->send_layer(t, {layer, 0, 8, std::make_shared<const Runs>(plan.parts[0].runs)});
  }
  void result(std::uint32_t head, const wire::Result& r) {
    wire::Buffer out;
    append_result(out, head, r);
    write(out);
  }
  template <class Frame>
  bool read_frame(std::uint32_t head, Frame* out) {
    std::uint8_t eight[8];
    if (!read_exactly(fd, eight, 8)) return false;
    const wire::FrameHead frame = wire::parse_frame_head(eight);
    std::vector<std::uint8_t> body(frame.length);
    std::string why;
    return read_exactly(fd, body.data(), body.size()) && frame.head == head &&
           decode(wire::Body(body), out, &why);
  }
};

}  // namespace

TEST(success_before_the_bytes_were_sent) {
  // A transfer larger than the socket: it cannot have arrived.
  RawReceiver peer;
  peer.welcome(wire::TransportKind::kTcp);
  REQUIRE(peer.log->wait_ready());
  const TransferHandle t = peer.open(1);
  auto runs = std::make_shared<Runs>();
  for (int i = 0; i < 20000; ++i) runs->push_back({0, 0, peer.source.shape.layer_bytes()});
  peer.connection->send_layer(t, {0, 0, 8, runs});
  wire::Open open;
  REQUIRE(peer.read_frame(wire::kOpen, &open));
  peer.result(wire::kDone, {t, Code::kOk, 8, ""});
  const Log::Result result = peer.log->wait_result(t);
  CHECK_EQ(code_name(result.code), "BAD_REQUEST");
  CHECK(result.detail.find("too early") != std::string::npos);
}

TEST(success_without_asking_whether_the_source_was_held) {
  RawReceiver peer;
  peer.welcome(wire::TransportKind::kCma);
  REQUIRE(peer.log->wait_ready());
  const TransferHandle t = peer.open(1);
  peer.send_layer(t, 0);
  peer.connection->end(t);
  wire::Open open;
  REQUIRE(peer.read_frame(wire::kOpen, &open));
  peer.result(wire::kDone, {t, Code::kOk, 8, ""});
  CHECK_EQ(code_name(peer.log->wait_result(t).code), "BAD_REQUEST");
}

TEST(the_word_is_given_only_for_what_is_held) {
  RawReceiver peer;
  peer.welcome(wire::TransportKind::kCma);
  REQUIRE(peer.log->wait_ready());
  const TransferHandle t = peer.open(1);
  wire::Open open;
  REQUIRE(peer.read_frame(wire::kOpen, &open));
  peer.connection->cancel(t, Code::kExpired, "lease is over");
  CHECK_EQ(code_name(peer.log->wait_result(t).code), "EXPIRED");
  wire::Result cancelled;
  REQUIRE(peer.read_frame(wire::kCancel, &cancelled));
  wire::Buffer ask;
  wire::append_ask_held(ask, t);
  peer.write(ask);
  wire::Held held;
  REQUIRE(peer.read_frame(wire::kHeld, &held));
  CHECK(!held.held);
}

TEST(results_for_nothing_are_ignored) {
  RawReceiver peer;
  peer.welcome(wire::TransportKind::kTcp);
  REQUIRE(peer.log->wait_ready());
  peer.result(wire::kDone, {77, Code::kOk, 8, ""});
  const TransferHandle t = peer.open(1);
  peer.send_layer(t, 0);
  peer.connection->end(t);
  REQUIRE(peer.log->wait_released(t));
  peer.result(wire::kDone, {t, Code::kOk, 8, ""});
  peer.result(wire::kDone, {t, Code::kCorrupt, 8, ""});  // a second opinion
  CHECK_EQ(code_name(peer.log->wait_result(t).code), "OK");
}

TEST(frames_that_end_the_connection) {
  const auto ends = [](Code code, bool welcomed, auto speak) {
    RawReceiver peer;
    if (welcomed) {
      peer.welcome(wire::TransportKind::kTcp);
      REQUIRE(peer.log->wait_ready());
    }
    const TransferHandle t = peer.open(1);
    speak(peer);
    CHECK_EQ(code_name(peer.log->wait_lost().code), code_name(code));
    CHECK_EQ(code_name(peer.log->wait_result(t).code), code_name(code));
  };
  const auto raw = [](std::uint32_t head, std::uint32_t length) {
    wire::Buffer out;
    append_le(out, head);
    append_le(out, length);
    return out;
  };
  ends(Code::kBadRequest, true, [&](RawReceiver& p) { p.write(raw(head("WHAT"), 0)); });
  ends(Code::kBadRequest, true, [&](RawReceiver& p) { p.write(raw(wire::kDone, 1u << 30)); });
  ends(Code::kBadRequest, true, [&](RawReceiver& p) { p.welcome(wire::TransportKind::kTcp); });
  ends(Code::kBadRequest, true, [&](RawReceiver& p) {
    wire::Buffer out;
    wire::append_end(out, 1);
    p.write(out);
  });
  ends(Code::kExpired, true,
       [&](RawReceiver& p) { p.result(wire::kFail, {0, Code::kExpired, 0, "enough"}); });
  ends(Code::kPeerLost, true, [&](RawReceiver& p) { ::shutdown(p.fd, SHUT_RDWR); });
  ends(Code::kBadRequest, false,
       [&](RawReceiver& p) { p.result(wire::kDone, {1, Code::kOk, 0, ""}); });
  ends(Code::kIncompatible, false, [&](RawReceiver& p) {
    wire::Buffer out;
    append(out, wire::Welcome{Code::kIncompatible, 1, wire::TransportKind::kTcp, "dtype", {}});
    p.write(out);
  });
  ends(Code::kBadRequest, false, [&](RawReceiver& p) {
    wire::Buffer out;
    append(out, wire::Welcome{Code::kOk, 9, wire::TransportKind::kTcp, "", {}});
    p.write(out);
  });
}
