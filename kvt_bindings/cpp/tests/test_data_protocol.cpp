// The connection's frames: byte for byte, truncated at every length, and with every byte damaged.
#include "check.h"
#include "kvt/data_protocol.h"

using namespace kvt;
using wire::append_blocks;
using wire::append_result;

namespace {

std::string hex(const wire::Buffer& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t b : bytes) {
    text += kDigits[b >> 4];
    text += kDigits[b & 15];
  }
  return text;
}

template <class Frame>
void survives_damage(const wire::Buffer& frame) {
  const wire::Body body(frame.data() + 8, frame.size() - 8);
  Frame out;
  std::string why;
  CHECK(decode(body, &out, &why));
  for (std::size_t size = 0; size < body.size(); ++size) {
    why.clear();
    CHECK(!decode(body.first(size), &out, &why));
    CHECK(!why.empty());
  }
  wire::Buffer longer(body.begin(), body.end());
  longer.push_back(0);
  CHECK(!decode(wire::Body(longer), &out, &why));
  for (std::size_t i = 0; i < body.size(); ++i) {  // may or may not be refused; must not misbehave
    for (const std::uint8_t value : {0x00, 0x7F, 0x80, 0xFF}) {
      wire::Buffer damaged(body.begin(), body.end());
      damaged[i] = value;
      (void)decode(wire::Body(damaged), &out, &why);
    }
  }
}

}  // namespace

TEST(blocks_frame) {
  wire::Buffer out;
  const Runs runs = {{1, 2, 3}, {0x10, 0x20, 0x30}, {4, 5, 6}};
  CHECK_EQ(append_blocks(out, {7, 0x0102, 16, 32}, runs, 0, 2), 0x33u);
  CHECK_EQ(hex(out),
           "44455343"  // DESC
           "58000000"  // 28 + 2 * 30
           "07000000"
           "0201"
           "0000"  // transfer, layer, flags
           "10000000"
           "20000000"          // tokens [16, 32)
           "02000000"          // descriptors
           "3300000000000000"  // payload bytes
           "0100000000000000"
           "0200000000000000"
           "0300000000000000"
           "07000000"
           "0201"
           "1000000000000000"
           "2000000000000000"
           "3000000000000000"
           "07000000"
           "0201");
  wire::Blocks blocks;
  std::string why;
  REQUIRE(decode(wire::Body(out).subspan(8), &blocks, &why));
  CHECK_EQ(blocks.blocks.size(), 2u);
  CHECK_EQ(static_cast<std::uint64_t>(blocks.blocks[1].dst_offset), 0x20u);
  CHECK((blocks.chunk == wire::Chunk{7, 0x0102, 16, 32}));
  survives_damage<wire::Blocks>(out);
}

TEST(every_frame_survives_damage) {
  wire::Hello hello;
  hello.layout = {1, 2, 3};
  hello.regions = {{4, {0, 100, 0x1000, MemoryKind::kHost, -1}}};
  wire::Buffer out;
  append(out, hello);
  survives_damage<wire::Hello>(out);
  out.clear();
  append(out, wire::Welcome{Code::kOk, 1, wire::TransportKind::kCma, "why", {9, 9}});
  survives_damage<wire::Welcome>(out);
  out.clear();
  append(out, wire::Open{1, 1, {}, {}, 0, 8});
  survives_damage<wire::Open>(out);
  out.clear();
  append(out, wire::ChunkEnd{{1, 2, 0, 8}, 0xDEADBEEF});
  survives_damage<wire::ChunkEnd>(out);
  out.clear();
  append_result(out, wire::kDone, {1, Code::kTimeout, 5, "late"});
  survives_damage<wire::Result>(out);
  out.clear();
  append(out, wire::Held{1, true});
  survives_damage<wire::Held>(out);
}

TEST(round_trips) {
  wire::Hello hello;
  hello.source_rank = 3;
  hello.target_rank = 5;
  hello.transports = 3;
  hello.pid = 77;
  hello.start_time_ticks = 88;
  hello.nonce_address = 99;
  hello.nonce.fill(0x4E);
  hello.layout = {1, 2, 3};
  hello.regions = {{4, {16, 100, 0x1000, MemoryKind::kHost, -1}}};
  wire::Buffer out;
  append(out, hello);
  wire::Hello back;
  std::string why;
  REQUIRE(decode(wire::Body(out).subspan(8), &back, &why));
  CHECK_EQ(back.source_rank, 3);
  CHECK_EQ(back.target_rank, 5);
  CHECK_EQ(back.start_time_ticks, 88u);
  CHECK(back.nonce == hello.nonce);
  CHECK(back.layout == hello.layout);
  REQUIRE(back.regions.size() == 1);
  CHECK_EQ(back.regions[0].layer, 4);
  CHECK_EQ(back.regions[0].region.layer_offset, 16u);
  CHECK_EQ(back.regions[0].region.address, 0x1000u);
}

TEST(details_are_cut) {
  wire::Buffer out;
  append_result(out, wire::kFail, {0, Code::kInternal, 0, std::string(5000, 'x')});
  CHECK(out.size() - 8 <= wire::max_body_bytes(wire::kFail));
  wire::Result result;
  std::string why;
  REQUIRE(decode(wire::Body(out).subspan(8), &result, &why));
  CHECK_EQ(result.detail.size(), wire::kMaxDetailBytes);
}

TEST(bounds) {
  std::string why;
  wire::Open open;
  wire::Buffer out;
  append(out, wire::Open{1, 0, {}, {}, 8, 8});
  CHECK(!decode(wire::Body(out).subspan(8), &open, &why));
  out.clear();
  append(out, wire::Open{1, 2, {}, {}, 0, 8});
  CHECK(!decode(wire::Body(out).subspan(8), &open, &why));
  out.clear();
  append(out, wire::Open{1, 0, {}, {}, 0, 0});  // the grant's range
  CHECK(decode(wire::Body(out).subspan(8), &open, &why));
  CHECK_EQ(wire::max_body_bytes(head("NOPE")), 0u);
  out.clear();
  append_blocks(out, {1, 0, 0, 8}, {{0, 0, wire::kMaxPayloadBytes}, {0, 0, 1}}, 0, 2);
  wire::Blocks blocks;
  CHECK(!decode(wire::Body(out).subspan(8), &blocks, &why));
}
