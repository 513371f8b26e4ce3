// Outcome codes, the numbers of which are stable on the wire and shared with simple_rpc.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace kvt {

enum class Code : std::uint8_t {
  kOk = 0,
  kAccepted = 1,
  kNotFound = 2,
  kGone = 3,
  kBusy = 4,
  kAborted = 5,
  kExpired = 6,
  kIncompatible = 7,
  kUnreachable = 8,
  kPeerLost = 9,
  kTimeout = 10,
  kCorrupt = 11,
  kBadRequest = 12,
  kUnauthorized = 13,
  kInternal = 14,
};

inline constexpr std::uint8_t kNumCodes = 15;

constexpr std::string_view code_name(Code code) {
  constexpr std::string_view kNames[kNumCodes] = {
      "OK",      "ACCEPTED", "NOT_FOUND",    "GONE",         "BUSY",
      "ABORTED", "EXPIRED",  "INCOMPATIBLE", "UNREACHABLE",  "PEER_LOST",
      "TIMEOUT", "CORRUPT",  "BAD_REQUEST",  "UNAUTHORIZED", "INTERNAL"};
  const auto i = static_cast<std::uint8_t>(code);
  return i < kNumCodes ? kNames[i] : std::string_view("UNKNOWN");
}

// A number from a socket, or INTERNAL if it names no code.
constexpr Code code_from_wire(std::uint64_t value) {
  return value < kNumCodes ? static_cast<Code>(value) : Code::kInternal;
}

// An outcome with a sentence for a human; returned where a failure is an ordinary result.
struct Status {
  Code code = Code::kOk;
  std::string detail;

  bool ok() const { return code == Code::kOk; }
};

// Thrown by calls of the local embedder (never across a thread's top frame, never for what a peer
// sent on the data path). The Python face turns it into KvtError with the same code.
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& what) : std::runtime_error(what), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

}  // namespace kvt
