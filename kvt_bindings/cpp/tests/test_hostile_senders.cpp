// A sender that breaks the rules harms its own transfer and no byte of memory.
#include <thread>

#include "data_fixture.h"
#include "kvt/crc32c.h"

using namespace data_test;

namespace {

struct Victim {
  Shape shape;
  Cache target{shape};
  std::shared_ptr<Sink> sink = std::make_shared<Sink>();
  Receiver receiver{target.cache, sink, Ends::config_of(wire::TransportKind::kTcp)};
  PairPlanner planner{shape.layout(), shape.layout()};
  std::vector<std::vector<std::uint8_t>> before;

  Victim() {
    target.fill(7);
    before = target.memory;
  }
  ~Victim() {
    receiver.close();
    CHECK_EQ(sink->reserved(), sink->pushed());
  }
  // One layer's ranges for blocks {4, 5}, tokens [0, 8).
  Runs runs() const { return planner.expected(0, 0, {{4, 5}}, {0, 8}).parts[0].runs; }
  std::uint64_t layer_bytes() const { return 2 * 2 * shape.block_bytes(); }

  void grant_it(std::uint8_t key = 1) {
    REQUIRE(receiver.open_grant(grant(key_of(key), {4, 5}, 0, 8)).ok());
  }
};

wire::Chunk chunk(std::uint32_t t, std::uint16_t layer = 0, std::uint32_t first = 0,
                  std::uint32_t end = 8) {
  return {t, layer, first, end};
}

void expect_violation(const char* what, const wire::Chunk& c, Runs runs) {
  Victim v;
  v.grant_it();
  RawSender sender(v.receiver, v.shape);
  sender.greet();
  sender.open(1, key_of(1), 0, 8);
  std::uint64_t bytes = 0;
  for (const Run& r : runs) bytes += r.length;
  sender.blocks(c, runs);
  sender.payload(bytes);
  const wire::Result result = sender.done();
  if (result.code != Code::kBadRequest) check::fail(what, 0, std::string(code_name(result.code)));
  CHECK_EQ(code_name(v.sink->last(1).code), "BAD_REQUEST");
  CHECK_EQ(v.receiver.snapshot().num_violations, 1u);
  CHECK(v.target.memory == v.before);
  // The stream stayed in step: the next transfer on the same connection works.
  v.grant_it(2);
  sender.open(2, key_of(2), 0, 8);
  for (std::uint16_t layer = 0; layer < v.shape.layers; ++layer) {
    sender.blocks(chunk(2, layer), v.runs());
    sender.payload(v.layer_bytes());
    sender.chunk_end(chunk(2, layer));
  }
  CHECK_EQ(code_name(sender.done().code), "OK");
}

}  // namespace

TEST(descriptors_outside_the_grant) {
  Victim v;
  const Runs good = v.runs();
  Runs bad = good;
  bad[0].dst_offset -= 1;
  expect_violation("one byte early", chunk(1), bad);
  bad = good;
  bad.back().length += 1;
  expect_violation("one byte long", chunk(1), bad);
  bad = good;
  bad[0].dst_offset = v.shape.layer_bytes() - 8;
  expect_violation("past the cache", chunk(1), bad);
  bad[0].dst_offset = ~0ull - 4;
  expect_violation("wraps around", chunk(1), bad);
  bad = {{0, 9 * v.shape.block_bytes(), v.shape.block_bytes()}};
  expect_violation("another request's block", chunk(1), bad);
  bad = good;
  bad.push_back(good[0]);
  expect_violation("overlapping", chunk(1), bad);
  expect_violation("unknown layer", chunk(1, 3), good);
  expect_violation("tokens after the grant", chunk(1, 0, 0, 9), good);
}

TEST(a_range_is_accepted_once) {
  Victim v;
  v.grant_it();
  RawSender sender(v.receiver, v.shape);
  sender.greet();
  sender.open(1, key_of(1), 0, 8);
  const auto layer = [&](std::uint16_t number, std::uint8_t value) {
    sender.blocks(chunk(1, number), v.runs());
    sender.payload(v.layer_bytes(), value);
    sender.chunk_end(chunk(1, number));
  };
  layer(0, 0x11);
  layer(0, 0x22);  // the same again: drained
  layer(1, 0x11);
  layer(1, 0x33);
  layer(2, 0x11);
  CHECK_EQ(code_name(sender.done().code), "OK");
  auto expected = v.before;
  for (auto& l : expected) {
    for (const Run& r : v.runs()) std::memset(l.data() + r.dst_offset, 0x11, r.length);
  }
  CHECK(v.target.memory == expected);
  const ReceiverSnapshot seen = v.receiver.snapshot();
  CHECK_EQ(seen.num_repeats, 2u);
  CHECK_EQ(seen.bytes_drained, 2 * v.layer_bytes());
  CHECK_EQ(seen.num_violations, 0u);
}

TEST(a_count_of_bytes_is_not_coverage) {
  // As many bytes as the transfer has, but one layer twice: not complete.
  Victim v;
  v.grant_it();
  RawSender sender(v.receiver, v.shape);
  sender.greet();
  sender.open(1, key_of(1), 0, 8);
  for (const std::uint16_t number : {0, 0, 1}) {
    sender.blocks(chunk(1, number), v.runs());
    sender.payload(v.layer_bytes());
    sender.chunk_end(chunk(1, number));
  }
  wire::Buffer end;
  wire::append_end(end, 1);
  sender.write(end);
  const wire::Result result = sender.done();
  CHECK_EQ(code_name(result.code), "BAD_REQUEST");
  CHECK(result.detail.find("layer 2") != std::string::npos);
}

TEST(partial_repeats_and_broken_chunks) {
  const auto second_frame = [](const char* what, const wire::Chunk& c, auto change) {
    Victim v;
    v.grant_it();
    RawSender sender(v.receiver, v.shape);
    sender.greet();
    sender.open(1, key_of(1), 0, 8);
    sender.blocks(chunk(1), {v.runs()[0]});
    sender.payload(v.runs()[0].length);
    if (change(sender)) {
      const Runs all = v.runs();
      sender.blocks(c, all);
      sender.payload(v.layer_bytes());
    }
    const wire::Result result = sender.done();
    if (result.code != Code::kBadRequest) check::fail(what, 0, std::string(code_name(result.code)));
  };
  const auto go_on = [](RawSender&) { return true; };
  second_frame("overlaps in part", chunk(1), go_on);
  second_frame("another chunk before the end of the first", chunk(1, 1), go_on);
  second_frame("end of another chunk", chunk(1), [](RawSender& s) {
    s.chunk_end(chunk(1, 2));
    return false;
  });
}

TEST(frames_that_end_the_connection) {
  const auto ends = [](const char* what, auto speak) {
    Victim v;
    v.grant_it();
    RawSender sender(v.receiver, v.shape);
    speak(sender);
    std::uint32_t head = 0;
    std::vector<std::uint8_t> body;
    bool fail_seen = false;
    while (sender.read_raw(&head, &body)) fail_seen |= head == wire::kFail;
    if (!fail_seen) check::fail(what, 0, "no FAIL");
    CHECK(v.receiver.snapshot().num_violations > 0 || std::string(what) == "refused hello");
    CHECK(v.target.memory == v.before);
  };
  const auto raw = [](std::uint32_t head, std::uint32_t length) {
    wire::Buffer out;
    append_le(out, head);
    append_le(out, length);
    return out;
  };
  ends("unknown head", [&](RawSender& s) { s.write(raw(head("WHAT"), 4)); });
  ends("no hello", [&](RawSender& s) { s.open(1, key_of(1), 0, 8); });
  ends("huge hello", [&](RawSender& s) { s.write(raw(wire::kHello, 0xFFFFFFFF)); });
  ends("second hello", [&](RawSender& s) {
    s.greet();
    wire::Buffer out;
    append(out, s.hello());
    s.write(out);
  });
  ends("huge frame", [&](RawSender& s) {
    s.greet();
    s.write(raw(wire::kBlocks, 1u << 30));
  });
  ends("a receiver's frame", [&](RawSender& s) {
    s.greet();
    wire::Buffer out;
    wire::append_ask_held(out, 1);
    s.write(out);
  });
  ends("blocks of a transfer never opened", [&](RawSender& s) {
    s.greet();
    s.blocks(chunk(5), {{0, 0, 8}});
  });
  ends("a handle used twice", [&](RawSender& s) {
    s.greet();
    s.open(1, key_of(1), 0, 8);
    s.open(1, key_of(1), 0, 8);
  });
  ends("lengths that do not add up", [&](RawSender& s) {
    s.greet();
    s.open(1, key_of(1), 0, 8);
    wire::Buffer out;
    append_blocks(out, chunk(1), {{0, 0, 8}, {8, 8, 8}}, 0, 2);
    store_le<std::uint64_t>(out.data() + 8 + 20, 17);
    s.write(out);
  });
  ends("too many descriptors", [&](RawSender& s) {
    s.greet();
    s.open(1, key_of(1), 0, 8);
    wire::Buffer out;
    append_blocks(out, chunk(1), {{0, 0, 8}}, 0, 1);
    store_le<std::uint32_t>(out.data() + 8 + 16, 8193);
    s.write(out);
  });
  ends("refused hello", [&](RawSender& s) {
    wire::Hello h = s.hello();
    h.target_rank = 3;
    wire::Buffer out;
    append(out, h);
    s.write(out);
  });
}

TEST(a_wrong_checksum_is_corrupt) {
  for (const bool right : {true, false}) {
    Victim v;
    v.grant_it();
    RawSender sender(v.receiver, v.shape);
    sender.greet();
    sender.open(1, key_of(1), 0, 8, wire::kOpenFlagCrc);
    const std::vector<std::uint8_t> bytes(v.layer_bytes(), 0x5A);
    const std::uint32_t crc = crc32c(bytes.data(), bytes.size());
    for (std::uint16_t layer = 0; layer < v.shape.layers; ++layer) {
      sender.blocks(chunk(1, layer), v.runs());
      sender.write(bytes.data(), bytes.size());
      sender.chunk_end(chunk(1, layer), layer == 1 && !right ? crc ^ 1 : crc);
    }
    const wire::Result result = sender.done();
    CHECK_EQ(code_name(result.code), right ? "OK" : "CORRUPT");
    CHECK_EQ(v.receiver.snapshot().num_corrupt, right ? 0u : 1u);
    if (!right) CHECK(result.detail.find("layer 1") != std::string::npos);
  }
}

TEST(close_while_the_sender_hangs_in_its_payload) {
  Victim v;
  v.grant_it();
  RawSender sender(v.receiver, v.shape);
  sender.greet();
  sender.open(1, key_of(1), 0, 8);
  sender.blocks(chunk(1), v.runs());
  sender.payload(v.layer_bytes() / 2);
  while (v.receiver.snapshot().bytes_placed < v.layer_bytes() / 2) std::this_thread::yield();
  CHECK(v.receiver.close_grant(key_of(1)).ok());  // nobody finishes that payload, and it returns
  const auto at_close = v.target.memory;
  CHECK(at_close != v.before);
  CHECK_EQ(code_name(v.sink->last(1).code), "ABORTED");
  sender.payload(v.layer_bytes() - v.layer_bytes() / 2, 0x77);
  sender.chunk_end(chunk(1));
  CHECK_EQ(code_name(sender.done().code), "ABORTED");
  // In step behind it:
  v.grant_it(2);
  sender.open(2, key_of(2), 0, 8);
  wire::Buffer cancel;
  wire::append_result(cancel, wire::kCancel, {2, Code::kGone, 0, "changed my mind"});
  sender.write(cancel);
  CHECK_EQ(code_name(v.sink->last(2).code), "GONE");
  CHECK(v.target.memory == at_close);
}

TEST(end_of_file_at_every_stage) {
  Victim full;
  const Runs runs = full.runs();
  wire::Buffer stream;
  append(stream, RawSender(full.receiver, full.shape).hello());
  const std::size_t greeting = stream.size();
  append(stream, wire::Open{1, 0, key_of(1), kSender, 0, 8});
  const std::size_t opened = stream.size();
  append_blocks(stream, chunk(1), runs, 0, runs.size());
  stream.resize(stream.size() + full.layer_bytes());
  append(stream, wire::ChunkEnd{chunk(1), 0});
  const std::size_t step = 7;
  for (std::size_t cut = 1; cut < stream.size(); cut += step) {
    Victim v;
    v.grant_it();
    RawSender sender(v.receiver, v.shape);
    sender.write(stream.data(), cut);
    if (cut >= greeting) {
      wire::Welcome
          welcome;  // unread, it would turn the end into a reset that loses what is behind
      CHECK(sender.read_frame(wire::kWelcome, &welcome));
    }
    sender.close();
    if (cut >= opened) {
      CHECK_EQ(code_name(v.sink->last(1).code), "PEER_LOST");
    } else {
      // It never opened the transfer: the grant is as it was.
      while (!v.receiver.snapshot().connections.empty()) std::this_thread::yield();
      CHECK_EQ(v.receiver.snapshot().grants.size(), 1u);
      CHECK(v.target.memory == v.before);
    }
  }
}

TEST(one_source_ends_alone) {
  // Two ranks owe bytes; one dies. The other's slice is not touched by that, and closing the grant
  // ends it.
  Shape split;
  split.tp = 2;
  Shape whole;
  Cache target(whole);
  auto sink = std::make_shared<Sink>();
  Receiver receiver(target.cache, sink, Ends::config_of(wire::TransportKind::kTcp));
  REQUIRE(receiver.open_grant(grant(key_of(1), {4, 5}, 0, 8, {0, 1})).ok());
  RawSender zero(receiver, split);
  RawSender one(receiver, split);
  zero.greet(0);
  one.greet(1);
  zero.open(1, key_of(1), 0, 8);
  one.open(1, key_of(1), 0, 8);
  PairPlanner planner(split.layout(), whole.layout());
  const auto send_all = [&](RawSender& s, std::uint32_t rank) {
    const Plan plan = planner.expected(rank, 0, {{4, 5}}, {0, 8});
    for (const std::uint16_t layer : plan.parts[0].layers) {
      s.blocks(chunk(1, layer), plan.parts[0].runs);
      s.payload(plan.parts[0].bytes, static_cast<std::uint8_t>(0x40 + rank));
      s.chunk_end(chunk(1, layer));
    }
  };
  one.close();
  CHECK_EQ(code_name(sink->last(1).code), "PEER_LOST");
  CHECK_EQ(sink->last(1).other_rank, 1u);
  CHECK_EQ(receiver.snapshot().grants.size(), 1u);  // F06: open until every rank's end
  send_all(zero, 0);
  CHECK_EQ(code_name(zero.done().code), "OK");
  CHECK_EQ(sink->last(2).other_rank, 0u);
  CHECK(receiver.snapshot().grants.empty());
  receiver.close();
  CHECK_EQ(sink->reserved(), sink->pushed());
}

TEST(a_second_connection_cannot_take_over) {
  Victim v;
  v.grant_it();
  RawSender first(v.receiver, v.shape);
  RawSender second(v.receiver, v.shape);
  first.greet();
  second.greet();
  first.open(1, key_of(1), 0, 8);
  while (v.receiver.snapshot().grants.at(0).sources.at(0).state != "receiving") {
    std::this_thread::yield();
  }
  second.open(1, key_of(1), 0, 8);
  CHECK_EQ(code_name(second.done().code), "BUSY");
  for (std::uint16_t layer = 0; layer < v.shape.layers; ++layer) {
    first.blocks(chunk(1, layer), v.runs());
    first.payload(v.layer_bytes());
    first.chunk_end(chunk(1, layer));
  }
  CHECK_EQ(code_name(first.done().code), "OK");
  second.open(2, key_of(1), 0, 8);
  CHECK_EQ(code_name(second.done().code), "GONE");
}

TEST(nothing_resumes_after_a_loss) {
  Victim v;
  v.grant_it();
  {
    RawSender first(v.receiver, v.shape);
    first.greet();
    first.open(1, key_of(1), 0, 8);
  }
  CHECK_EQ(code_name(v.sink->last(1).code), "PEER_LOST");
  RawSender second(v.receiver, v.shape);
  second.greet();
  second.open(1, key_of(1), 0, 8);
  CHECK_EQ(code_name(second.done().code), "GONE");
}
