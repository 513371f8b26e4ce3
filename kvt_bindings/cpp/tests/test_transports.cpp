// What every transport must do, run over each of them: real receiver, real client, real sockets.
#include <thread>

#include "data_fixture.h"

using namespace data_test;

namespace {

const BlockLists kSrc = {{9, 3, 4, 11, 0}};
const BlockLists kDst = {{1, 2, 14, 7, 8}};

template <class Body>
void over_each(Body body) {
  for (const auto kind : kAllKinds) body(kind);
}

}  // namespace

TEST(whole_transfer) {
  over_each([](wire::TransportKind kind) {
    Ends ends(kind);
    REQUIRE(ends.connect());
    CHECK_EQ(ends.connection->transport(), wire::transport_name(kind));
    CHECK(*Layout::parse(ends.connection->peer_layout()) == ends.target.cache->layout());
    const auto before = ends.target.memory;
    REQUIRE(ends.receiver.open_grant(grant(key_of(1), kDst[0], 3, 18)).ok());
    const TransferHandle t = ends.open(key_of(1), 3, 18);
    const Plan plan = ends.plan(kSrc, kDst, {3, 18}, true);
    ends.send(t, plan, 3, 18);
    ends.connection->end(t);
    const Completion done = ends.sink->last(1);
    CHECK_EQ(code_name(done.code), "OK");
    CHECK(done.kind == Completion::Kind::kLoadDone);
    CHECK(done.key == key_of(1));
    CHECK_EQ(done.tokens, 18u);
    CHECK(ends.target.memory == ends.expected_after(plan, before));
    const Log::Result result = ends.log->wait_result(t);
    CHECK_EQ(code_name(result.code), "OK");
    CHECK_EQ(result.tokens, 18u);
    const ReceiverSnapshot seen = ends.receiver.snapshot();
    CHECK(seen.grants.empty());
    CHECK_EQ(seen.num_marks, 1u);
    CHECK_EQ(seen.num_completed, 1u);
    CHECK_EQ(seen.bytes_placed, plan.total_bytes());
    CHECK_EQ(seen.num_violations, 0u);
  });
}

TEST(chunks_in_any_order_with_checksums) {
  over_each([](wire::TransportKind kind) {
    Ends ends(kind);
    REQUIRE(ends.connect());
    const auto before = ends.target.memory;
    REQUIRE(ends.receiver.open_grant(grant(key_of(2), kDst[0], 0, 20)).ok());
    const TransferHandle t = ends.open(key_of(2), 0, 0, true);  // range left to the grant
    const Plan late = ends.plan(kSrc, kDst, {13, 20}, true);
    const Plan early = ends.plan(kSrc, kDst, {0, 13}, false);
    ends.send(t, late, 13, 20);
    ends.send(t, early, 0, 13);
    ends.connection->end(t);
    CHECK_EQ(code_name(ends.sink->last(1).code), "OK");
    CHECK_EQ(code_name(ends.log->wait_result(t).code), "OK");
    CHECK(ends.target.memory == ends.expected_after(late, ends.expected_after(early, before)));
  });
}

TEST(heads_split_over_target_ranks) {
  over_each([](wire::TransportKind kind) {
    Shape wide;
    Shape split;
    split.tp = 2;
    split.block_tokens = 2;
    Ends ends(kind, wide, split, 0, 1);
    REQUIRE(ends.connect());
    const auto before = ends.target.memory;
    const BlockLists dst = {{5, 0, 3, 2, 9, 4}};
    REQUIRE(ends.receiver.open_grant(grant(key_of(3), dst[0], 1, 11)).ok());
    const TransferHandle t = ends.open(key_of(3), 1, 11);
    const Plan plan = ends.plan(kSrc, dst, {1, 11}, true);
    ends.send(t, plan, 1, 11);
    ends.connection->end(t);
    CHECK_EQ(code_name(ends.sink->last(1).code), "OK");
    CHECK_EQ(ends.sink->last(1).rank, 1u);
    CHECK(ends.target.memory == ends.expected_after(plan, before));
  });
}

TEST(many_transfers_share_a_connection) {
  over_each([](wire::TransportKind kind) {
    Shape big;
    big.blocks = 256;
    Ends ends(kind, big, big);
    REQUIRE(ends.connect());
    constexpr std::uint8_t kNum = 60;
    std::vector<TransferHandle> handles;
    auto expected = ends.target.memory;
    for (std::uint8_t i = 0; i < kNum; ++i) {
      const BlockLists src = {{255u - i, i}};
      const BlockLists dst = {{2u * i, 2u * i + 1}};
      REQUIRE(ends.receiver.open_grant(grant(key_of(i), dst[0], 0, 8)).ok());
      const TransferHandle t = ends.open(key_of(i), 0, 8, i % 2 == 0);
      const Plan plan = ends.plan(src, dst, {0, 8}, true);
      ends.send(t, plan, 0, 8);
      ends.connection->end(t);
      handles.push_back(t);
      expected = ends.expected_after(plan, std::move(expected));
    }
    for (const Completion& c : ends.sink->wait(kNum)) CHECK_EQ(code_name(c.code), "OK");
    for (const TransferHandle t : handles) CHECK(ends.log->wait_result(t).code == Code::kOk);
    CHECK(ends.target.memory == expected);
  });
}

TEST(no_grant_and_wrong_senders_are_refused) {
  over_each([](wire::TransportKind kind) {
    Ends ends(kind);
    REQUIRE(ends.connect());
    const auto before = ends.target.memory;
    const TransferHandle unknown = ends.open(key_of(9), 0, 8);
    ends.send(unknown, ends.plan(kSrc, kDst, {0, 8}, true), 0, 8);
    ends.connection->end(unknown);
    CHECK_EQ(code_name(ends.log->wait_result(unknown).code), "NOT_FOUND");

    GrantSpec other = grant(key_of(10), kDst[0], 0, 8);
    other.sender_incarnation = incarnation_of(0x51);
    REQUIRE(ends.receiver.open_grant(other).ok());
    const TransferHandle foreign = ends.open(key_of(10), 0, 8);
    ends.send(foreign, ends.plan(kSrc, kDst, {0, 8}, true), 0, 8);
    CHECK_EQ(code_name(ends.log->wait_result(foreign).code), "UNAUTHORIZED");

    other = grant(key_of(11), kDst[0], 0, 8);
    other.sender_instance = "p1";
    REQUIRE(ends.receiver.open_grant(other).ok());
    CHECK_EQ(code_name(ends.log->wait_result(ends.open(key_of(11), 0, 8)).code), "UNAUTHORIZED");

    REQUIRE(ends.receiver.open_grant(grant(key_of(12), kDst[0], 0, 8, {3})).ok());
    CHECK_EQ(code_name(ends.log->wait_result(ends.open(key_of(12), 0, 8)).code), "BAD_REQUEST");
    CHECK_EQ(ends.receiver.snapshot().num_refused_opens, 4u);
    CHECK_EQ(ends.receiver.snapshot().grants.size(), 3u);  // none of it hurt the transfers
    CHECK(ends.target.memory == before);
  });
}

TEST(close_ends_a_transfer_and_its_sender_hears) {
  over_each([](wire::TransportKind kind) {
    Ends ends(kind);
    REQUIRE(ends.connect());
    REQUIRE(ends.receiver.open_grant(grant(key_of(4), kDst[0], 0, 16)).ok());
    const TransferHandle t = ends.open(key_of(4), 0, 16);
    ends.send(t, ends.plan(kSrc, kDst, {0, 8}, false), 0, 8);
    while (ends.receiver.snapshot().bytes_placed == 0) std::this_thread::yield();
    CHECK(ends.receiver.close_grant(key_of(4)).ok());
    const auto after_close = ends.target.memory;
    CHECK_EQ(code_name(ends.sink->last(1).code), "ABORTED");
    ends.send(t, ends.plan(kSrc, kDst, {8, 16}, true), 8, 16);
    ends.connection->end(t);
    CHECK_EQ(code_name(ends.log->wait_result(t).code), "ABORTED");
    CHECK(ends.target.memory == after_close);
    const Status late = ends.receiver.open_grant(grant(key_of(4), kDst[0], 0, 16));
    CHECK_EQ(code_name(late.code), "ABORTED");
    // The connection goes on.
    REQUIRE(ends.receiver.open_grant(grant(key_of(5), kDst[0], 0, 8)).ok());
    const TransferHandle next = ends.open(key_of(5), 0, 8);
    ends.send(next, ends.plan(kSrc, kDst, {0, 8}, true), 0, 8);
    ends.connection->end(next);
    CHECK_EQ(code_name(ends.log->wait_result(next).code), "OK");
  });
}

TEST(cancel_by_the_sender) {
  over_each([](wire::TransportKind kind) {
    Ends ends(kind);
    REQUIRE(ends.connect());
    REQUIRE(ends.receiver.open_grant(grant(key_of(6), kDst[0], 0, 16)).ok());
    const TransferHandle t = ends.open(key_of(6), 0, 16);
    ends.send(t, ends.plan(kSrc, kDst, {0, 8}, false), 0, 8);
    ends.connection->cancel(t, Code::kExpired, "lease is over");
    CHECK_EQ(code_name(ends.log->wait_result(t).code), "EXPIRED");
    // Whether the receiver ever heard of it depends on how far it got: then it is told so, and if
    // not nothing is lost.
    REQUIRE(ends.receiver.close_grant(key_of(6)).ok());
    const Code seen = ends.sink->last(1).code;
    CHECK(seen == Code::kExpired || seen == Code::kAborted);
  });
}

TEST(death_of_the_sender_fails_its_transfers) {
  over_each([](wire::TransportKind kind) {
    Ends ends(kind);
    REQUIRE(ends.connect());
    REQUIRE(ends.receiver.open_grant(grant(key_of(7), kDst[0], 0, 16)).ok());
    const TransferHandle t = ends.open(key_of(7), 0, 16);
    ends.send(t, ends.plan(kSrc, kDst, {0, 8}, false), 0, 8);
    while (ends.receiver.snapshot().bytes_placed == 0) std::this_thread::yield();
    ends.connection->close(Code::kAborted, "gone");
    CHECK_EQ(code_name(ends.log->wait_result(t).code), "ABORTED");
    CHECK_EQ(code_name(ends.log->wait_lost().code), "ABORTED");
    const Completion lost = ends.sink->last(1);
    CHECK_EQ(code_name(lost.code), "PEER_LOST");
    CHECK(lost.detail.find("rank 0 of p0") != std::string::npos);
    // Who opens a transfer on what is lost hears of it; the next connection works.
    auto late_log = std::make_shared<Log>();
    TransferOpen open;
    open.key = key_of(8);
    const TransferHandle late = ends.connection->open(open, late_log);
    CHECK_EQ(code_name(late_log->wait_result(late).code), "ABORTED");
    ends.log = std::make_shared<Log>();
    REQUIRE(ends.connect());
    REQUIRE(ends.receiver.open_grant(grant(key_of(9), kDst[0], 0, 8)).ok());
    const TransferHandle again = ends.open(key_of(9), 0, 8);
    ends.send(again, ends.plan(kSrc, kDst, {0, 8}, true), 0, 8);
    ends.connection->end(again);
    CHECK_EQ(code_name(ends.log->wait_result(again).code), "OK");
  });
}

TEST(death_of_the_receiver_fails_its_senders) {
  over_each([](wire::TransportKind kind) {
    Ends ends(kind);
    REQUIRE(ends.connect());
    REQUIRE(ends.receiver.open_grant(grant(key_of(7), kDst[0], 0, 16)).ok());
    const TransferHandle t = ends.open(key_of(7), 0, 16);
    ends.receiver.close();
    // What the sender hears depends on how far its OPEN had come: the end of its transfer, of the
    // connection, or (the grants are closed before the connections) that it came too late.
    const std::string heard(code_name(ends.log->wait_result(t).code));
    CHECK_EQ(heard == "ABORTED" || heard == "PEER_LOST" || heard == "GONE" ? "ended" : heard,
             "ended");
    ends.log->wait_lost();
    CHECK_EQ(code_name(ends.sink->last(1).code), "ABORTED");
  });
}

TEST(no_progress_is_a_timeout) {
  over_each([](wire::TransportKind kind) {
    Ends ends(kind);
    REQUIRE(ends.connect());
    GrantSpec spec = grant(key_of(7), kDst[0], 0, 16);
    spec.progress_timeout_ms = 60;
    REQUIRE(ends.receiver.open_grant(spec).ok());
    const TransferHandle t = ends.open(key_of(7), 0, 16);  // starts the clock
    CHECK_EQ(code_name(ends.sink->last(1).code), "TIMEOUT");
    CHECK_EQ(code_name(ends.log->wait_result(t).code), "TIMEOUT");
    // Nobody came at all: only the scheduler's word starts the clock.
    spec = grant(key_of(8), kDst[0], 0, 16);
    spec.progress_timeout_ms = 60;
    REQUIRE(ends.receiver.open_grant(spec).ok());
    CHECK(ends.receiver.snapshot().grants.at(0).sources.at(0).idle_s < 0);
    CHECK(ends.receiver.start_progress(key_of(8)).ok());
    CHECK_EQ(code_name(ends.sink->last(2).code), "TIMEOUT");
    CHECK_EQ(code_name(ends.receiver.start_progress(key_of(8)).code), "NOT_FOUND");
  });
}

TEST(end_of_the_scheduler_closes_its_grants) {
  over_each([](wire::TransportKind kind) {
    Ends ends(kind);
    REQUIRE(ends.receiver.open_grant(grant(key_of(1), kDst[0], 0, 16)).ok());
    GrantSpec other = grant(key_of(2), kDst[0], 0, 16);
    other.scheduler_incarnation = incarnation_of(0xD1);
    REQUIRE(ends.receiver.open_grant(other).ok());
    ends.receiver.end_scheduler(kScheduler);
    CHECK(ends.sink->last(1).key == key_of(1));
    CHECK_EQ(ends.receiver.snapshot().grants.size(), 1u);
    CHECK_EQ(code_name(ends.receiver.open_grant(grant(key_of(3), kDst[0], 0, 16)).code), "ABORTED");
  });
}

TEST(incompatible_layouts_are_refused_by_name) {
  over_each([](wire::TransportKind kind) {
    Shape other;
    other.model = "another";
    Ends ends(kind, {}, other);
    CHECK(!ends.connect());
    const Log::Result lost = ends.log->wait_lost();
    CHECK_EQ(code_name(lost.code), "INCOMPATIBLE");
    CHECK(lost.detail.find("another") != std::string::npos);
  });
}

TEST(wrong_grants_are_refused) {
  Ends ends(wire::TransportKind::kTcp);
  const auto code = [&](GrantSpec spec) {
    return std::string(code_name(ends.receiver.open_grant(std::move(spec)).code));
  };
  CHECK_EQ(code(grant(key_of(1), {1, 2}, 0, 9)), "BAD_REQUEST");      // too few blocks
  CHECK_EQ(code(grant(key_of(1), {1, 16}, 0, 8)), "BAD_REQUEST");     // no such block
  CHECK_EQ(code(grant(key_of(1), {1, 1}, 0, 8)), "BAD_REQUEST");      // twice the same
  CHECK_EQ(code(grant(key_of(1), {1, 2}, 8, 8)), "BAD_REQUEST");      // no tokens
  CHECK_EQ(code(grant(key_of(1), {1, 2}, 0, 8, {})), "BAD_REQUEST");  // nobody sends
  CHECK_EQ(code(grant(key_of(1), {1, 2}, 0, 8, {0, 0})), "BAD_REQUEST");
  CHECK_EQ(code(grant(key_of(1), {1, 2}, 0, 8)), "OK");
  CHECK_EQ(code(grant(key_of(1), {1, 2}, 0, 8)), "BAD_REQUEST");  // open already
}

TEST(nobody_answers_the_dial) {
  Cache source{Shape{}};
  auto log = std::make_shared<Log>();
  DataClientConfig config;
  config.connect_timeout_ms = 500;  // long enough for the second get() on a busy machine
  DataClient client(source.cache, [](const DialRequest&) {}, config);
  const auto connection = client.get(peer_of(), log);
  CHECK(connection == client.get(peer_of(), log));
  TransferOpen open;
  open.key = key_of(1);
  const TransferHandle t = connection->open(open, log);
  CHECK_EQ(code_name(log->wait_result(t).code), "UNREACHABLE");
  CHECK_EQ(code_name(log->wait_lost().code), "UNREACHABLE");
  CHECK(connection != client.get(peer_of(), std::make_shared<Log>()));
}

TEST(a_receiver_that_takes_nothing_delays_no_other) {
  // One peer never reads; while its connection is full another one's transfer runs to its end.
  Shape big;
  big.blocks = 512;
  big.block_tokens = 16;
  big.heads_total = 8;
  big.head_dim = 64;
  Ends ends(wire::TransportKind::kTcp, big, big);
  REQUIRE(ends.connect());
  const auto [ours, theirs] = socket_pair();
  auto stuck_log = std::make_shared<Log>();
  DataClientConfig config;
  config.transports = {wire::TransportKind::kTcp};
  DataClient stuck_client(ends.source.cache, [](const DialRequest&) {}, config);
  const auto stuck = stuck_client.get(peer_of(1), stuck_log);
  CHECK(stuck_client.adopt(1, ours).ok());
  wire::Buffer welcome;
  append(welcome, wire::Welcome{Code::kOk, wire::kDataVersion, wire::TransportKind::kTcp, "",
                                big.layout()->serialize()});
  CHECK_EQ(::send(theirs, welcome.data(), welcome.size(), 0), static_cast<ssize_t>(welcome.size()));
  REQUIRE(stuck_log->wait_ready());
  std::vector<std::uint32_t> blocks(512);
  for (std::uint32_t i = 0; i < 512; ++i) blocks[i] = i;
  const BlockLists all = {blocks};
  const Plan plan = ends.plan(all, all, {0, 8192}, true);
  TransferOpen open;
  open.key = key_of(1);
  const TransferHandle s = stuck->open(open, stuck_log);
  stuck->send_layer(s, {0, 0, 8192, std::make_shared<const Runs>(plan.parts[0].runs)});
  stuck->end(s);

  REQUIRE(ends.receiver.open_grant(grant(key_of(1), blocks, 0, 8192)).ok());
  const TransferHandle t = ends.open(key_of(1), 0, 8192);
  ends.send(t, plan, 0, 8192);
  ends.connection->end(t);
  CHECK_EQ(code_name(ends.log->wait_result(t).code), "OK");
  CHECK(!stuck_log->released(s));

  // Half way through its payload: the cancel is answered at once and the rest is filler.
  stuck->cancel(s, Code::kAborted, "enough");
  CHECK_EQ(code_name(stuck_log->wait_result(s).code), "ABORTED");
  const std::uint64_t sent = plan.parts[0].bytes;
  std::vector<std::uint8_t> rest(1 << 20);
  std::uint64_t got = 0;
  bool filler_seen = false;
  while (got < sent) {  // hello, open, descriptors, payload or filler, cancel
    const ssize_t n = recv(theirs, rest.data(), rest.size(), 0);
    REQUIRE(n > 0);
    got += static_cast<std::uint64_t>(n);
    for (ssize_t i = 4096; i <= n; i += 4096) {
      filler_seen |= std::all_of(rest.begin() + i - 4096, rest.begin() + i,
                                 [](std::uint8_t b) { return b == 0; });
    }
  }
  CHECK(filler_seen);
  ::close(theirs);
  stuck_client.close();
}
