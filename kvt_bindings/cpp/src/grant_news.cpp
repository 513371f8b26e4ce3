#include "kvt/grant_news.h"

#include <utility>

namespace kvt {
namespace {

// Bounds on one item: what a scheduler may name in it.
constexpr std::size_t kMaxItemFields = 16;
constexpr std::size_t kMaxBlocksPerGroup = 1 << 22;
constexpr std::size_t kMaxSourceRanks = 1 << 16;
constexpr std::size_t kMaxInstanceBytes = 256;
constexpr std::size_t kMaxOptions = 64;

enum class Op : std::uint64_t { kOpen = 0, kClose = 1, kStart = 2 };

std::uint32_t u32(msgpack::Reader& item, const char* field) {
  return static_cast<std::uint32_t>(item.uint(field, UINT32_MAX));
}

// The fields of an open, after op and key.
GrantSpec read_open(msgpack::Reader& item, std::size_t num_fields) {
  if (num_fields < 8) msgpack::Reader::fail("GRNT", "8 fields or more to open");
  GrantSpec spec;
  spec.sender_instance = std::string(item.str("sender_instance", kMaxInstanceBytes));
  spec.sender_incarnation = item.id16<Incarnation>("sender_incarnation");
  const std::size_t groups = item.array("block_ids", kMaxGroups);
  for (std::size_t i = 0; i < groups; ++i) {
    spec.block_ids.push_back(item.uint32s("block_ids", kMaxBlocksPerGroup));
  }
  spec.first_token = u32(item, "first_token");
  spec.end_token = u32(item, "end_token");
  spec.source_ranks = item.uint32s("source_ranks", kMaxSourceRanks);
  if (num_fields > 8) {
    for (std::size_t left = item.map("options", kMaxOptions); left > 0; --left) {
      if (item.str("option", kMaxInstanceBytes) == "progress_ms") {
        spec.progress_timeout_ms = u32(item, "progress_ms");
      } else {
        item.skip("option");
      }
    }
  }
  return spec;
}

}  // namespace

void serve_grants(NewsChannel& channel, std::weak_ptr<Receiver> receiver, std::uint32_t rank) {
  channel.on("GRNT", [&channel, receiver, rank](msgpack::Reader item) {
    const std::size_t num_fields = item.array("GRNT", kMaxItemFields);
    if (num_fields < 2) msgpack::Reader::fail("GRNT", "2 fields or more");
    const auto op = static_cast<Op>(item.uint("op", 2));
    const auto key = item.id16<TransferKey>("key");
    const auto live = receiver.lock();
    Status status{Code::kAborted, "the receiver is gone"};
    if (op == Op::kOpen) {
      GrantSpec spec = read_open(item, num_fields);
      spec.key = key;
      spec.scheduler_incarnation = channel.stats().peer;
      if (live) status = live->open_grant(std::move(spec));
    } else if (op == Op::kClose) {
      status = live ? live->close_grant(key) : Status{};
    } else {
      if (live) (void)live->start_progress(key);
      return;
    }
    msgpack::Writer ack;
    ack.array(5);
    ack.uint(rank);
    ack.id16(key);
    ack.uint(static_cast<std::uint64_t>(op));
    ack.uint(static_cast<std::uint64_t>(status.code));
    ack.str(status.detail);
    channel.publish("GACK", ack.take());
  });
  channel.on_peer_ended([receiver](const Incarnation& scheduler) {
    if (const auto live = receiver.lock()) live->end_scheduler(scheduler);
  });
}

}  // namespace kvt
