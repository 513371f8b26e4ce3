// The frames of a data connection, after GO: encoding and checked decoding, no I/O.
//
// Every frame is `head u32 | length u32 | body`, little-endian; the head's bytes spell its name.
// The bytes of a chunk follow their DESC frame raw (tcp) and are not part of its length. Integers
// have fixed places, so a dump can be read with this file beside it; docs/kvt/protocol.md shows
// each frame in hex. Decoders check every length, count and range and say what was wrong.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvt/bytes.h"
#include "kvt/code.h"
#include "kvt/ids.h"
#include "kvt/ipc_block.h"
#include "kvt/memory.h"
#include "kvt/run.h"

namespace kvt::wire {

inline constexpr std::uint16_t kDataVersion = 1;

// Limits, all checked on receipt.
inline constexpr std::size_t kFrameHeadBytes = 8;
inline constexpr std::uint32_t kMaxBlocksPerFrame = 8192;      // 240 KiB of descriptors
inline constexpr std::uint64_t kMaxPayloadBytes = 1ull << 36;  // of one DESC frame
inline constexpr std::uint32_t kMaxHelloBytes = 4u << 20;      // layouts and memory tables
inline constexpr std::uint32_t kMaxRegions = 1u << 16;         // in a cma memory table
inline constexpr std::uint32_t kMaxDetailBytes = 1024;         // sentences for humans
inline constexpr std::size_t kNonceBytes = 32;

inline constexpr std::uint32_t kHello = head("KHEL");     // sender → receiver, first
inline constexpr std::uint32_t kWelcome = head("KWEL");   // receiver → sender, the answer
inline constexpr std::uint32_t kOpen = head("OPEN");      // sender: a transfer begins
inline constexpr std::uint32_t kBlocks = head("DESC");    // sender: descriptors, then their bytes
inline constexpr std::uint32_t kChunkEnd = head("LAYR");  // sender: that was the whole chunk
inline constexpr std::uint32_t kEnd = head("ENDT");       // sender: no more chunks
inline constexpr std::uint32_t kCancel = head("CANC");    // sender: given up
inline constexpr std::uint32_t kHeld = head("HELD");      // sender: answer to ASKH (cma)
inline constexpr std::uint32_t kAskHeld = head("ASKH");   // receiver: was the source held? (cma)
inline constexpr std::uint32_t kDone = head("DONE");      // receiver: the transfer's result
inline constexpr std::uint32_t kFail = head("FAIL");      // either: this connection ends, and why

// What the acceptor's C++ writes when it has the socket: simple_rpc's OKAY with an empty array.
inline constexpr std::array<std::uint8_t, 9> kGo = {'O', 'K', 'A', 'Y', 1, 0, 0, 0, 0x90};

// Bits of the transports a peer can do; the numbers are stable on the wire.
enum class TransportKind : std::uint8_t { kTcp = 0, kCma = 1 };
inline constexpr std::uint32_t transport_bit(TransportKind kind) {
  return 1u << static_cast<unsigned>(kind);
}
std::string_view transport_name(TransportKind kind);

inline constexpr std::uint32_t kOpenFlagCrc = 1;  // chunks carry a CRC32C

struct Hello {
  std::uint16_t min_version = kDataVersion;
  std::uint16_t max_version = kDataVersion;
  std::int32_t source_rank = 0;
  std::int32_t target_rank = 0;
  std::uint32_t transports = 0;  // transport_bit()s offered
  // cma: who to read from, and a secret in its memory that proves it is that process.
  std::uint32_t pid = 0;
  std::uint64_t start_time_ticks = 0;  // field 22 of /proc/pid/stat
  std::uint64_t nonce_address = 0;
  std::array<std::uint8_t, kNonceBytes> nonce{};
  std::vector<std::uint8_t> layout;  // layout.h's encoding, opaque here
  struct Region {
    std::uint16_t layer = 0;
    MemoryRegion region;
  };
  std::vector<Region> regions;  // cma: the sender's host memory, to turn src_offset into an address
};

struct Welcome {
  Code code = Code::kOk;
  std::uint16_t version = kDataVersion;
  TransportKind transport = TransportKind::kTcp;
  std::string detail;  // why refused, or why not the better transport
  std::vector<std::uint8_t> layout;
};

struct Open {
  std::uint32_t transfer = 0;
  std::uint32_t flags = 0;
  TransferKey key;
  Incarnation sender_incarnation;
  // The tokens that will come; both 0: the range of the receiver's grant.
  std::uint32_t first_token = 0;
  std::uint32_t end_token = 0;
};

// Which chunk a DESC or LAYR belongs to.
struct Chunk {
  std::uint32_t transfer = 0;
  std::uint16_t layer = 0;
  std::uint32_t first_token = 0;
  std::uint32_t end_token = 0;

  bool operator==(const Chunk&) const = default;
};

struct Blocks {
  Chunk chunk;
  std::uint64_t payload_bytes = 0;   // sum of the lengths; follow the frame on tcp
  std::span<const IpcBlock> blocks;  // into the frame's body
};

struct ChunkEnd {
  Chunk chunk;
  std::uint32_t crc32c = 0;  // over the chunk's bytes in the order of its descriptors; 0 if unused
};

struct Result {                // DONE, CANC, FAIL
  std::uint32_t transfer = 0;  // 0 in FAIL
  Code code = Code::kOk;
  std::uint32_t tokens = 0;
  std::string detail;
};

struct Held {
  std::uint32_t transfer = 0;
  bool held = false;
};

inline constexpr std::size_t kBlocksHeaderBytes = 28;

struct FrameHead {
  std::uint32_t head = 0;
  std::uint32_t length = 0;
};
inline FrameHead parse_frame_head(const std::uint8_t* eight_bytes) {
  return {load_le<std::uint32_t>(eight_bytes), load_le<std::uint32_t>(eight_bytes + 4)};
}
// The largest body allowed under this head, or 0 if there is no such head.
std::uint32_t max_body_bytes(std::uint32_t head);

// Each appends one whole frame.
using Buffer = std::vector<std::uint8_t>;
void append(Buffer& to, const Hello& hello);
void append(Buffer& to, const Welcome& welcome);
void append(Buffer& to, const Open& open);
void append(Buffer& to, const ChunkEnd& end);
void append_end(Buffer& to, std::uint32_t transfer);
void append_result(Buffer& to, std::uint32_t head, const Result& result);  // DONE, CANC, FAIL
void append_ask_held(Buffer& to, std::uint32_t transfer);
void append(Buffer& to, const Held& held);
// The frame of `runs[first, first + count)`; its bytes go out after it (tcp). Returns their sum.
std::uint64_t append_blocks(Buffer& to, const Chunk& chunk, const Runs& runs, std::size_t first,
                            std::size_t count);

// Each decodes a body. On failure returns false and says why.
using Body = std::span<const std::uint8_t>;
bool decode(Body body, Hello* out, std::string* why);
bool decode(Body body, Welcome* out, std::string* why);
bool decode(Body body, Open* out, std::string* why);
bool decode(Body body, Blocks* out, std::string* why);
bool decode(Body body, ChunkEnd* out, std::string* why);
bool decode(Body body, Result* out, std::string* why);
bool decode(Body body, Held* out, std::string* why);
bool decode_transfer(Body body, std::uint32_t* out, std::string* why);  // ENDT, ASKH

}  // namespace kvt::wire
