#include "kvt/send_news.h"

#include <string>
#include <utility>

namespace kvt {
namespace {

// Bounds on one item: what a scheduler may name in it.
constexpr std::size_t kMaxSends = 1 << 16;
constexpr std::size_t kMaxFields = 16;
constexpr std::size_t kMaxBlocksPerGroup = 1 << 22;
constexpr std::size_t kMaxInstanceBytes = 256;
constexpr std::size_t kMaxAddressBytes = 512;

std::uint32_t u32(msgpack::Reader& item, const char* field) {
  return static_cast<std::uint32_t>(item.uint(field, UINT32_MAX));
}

BlockLists read_blocks(msgpack::Reader& item, const char* field) {
  BlockLists lists(item.array(field, kMaxGroups));
  for (auto& list : lists) list = item.uint32s(field, kMaxBlocksPerGroup);
  return lists;
}

std::vector<Send> read_sends(msgpack::Reader& item) {
  std::vector<Send> sends(item.array("sends", kMaxSends));
  for (Send& send : sends) send = read_send(item);
  return sends;
}

std::vector<std::uint8_t> none_open(std::uint32_t rank, const TransferKey& key, Code code) {
  msgpack::Writer w;
  w.array(6);
  w.uint(rank);
  w.id16(key);
  w.nil();
  w.uint(0);
  w.uint(static_cast<std::uint64_t>(code));
  w.str("nothing of this transfer is open here");
  return w.take();
}

// What could not even be begun is a completion, too.
void refuse(NewsChannel& channel, std::uint32_t rank, const std::vector<Send>& sends,
            const Error& why) {
  for (const Send& send : sends) {
    for (const SendTarget& target : send.targets) {
      channel.push({Completion::Kind::kSendDone, send.key, rank,
                    static_cast<std::uint32_t>(target.rank), send.first_token, why.code(),
                    why.what()});
    }
  }
}

}  // namespace

Send read_send(msgpack::Reader& item) {
  const std::size_t num_fields = item.array("send", kMaxFields);
  if (num_fields < 9) msgpack::Reader::fail("send", "9 fields or more");
  Send send;
  send.key = item.id16<TransferKey>("key");
  send.target_instance = std::string(item.str("target_instance", kMaxInstanceBytes));
  send.target_incarnation = item.id16<Incarnation>("target_incarnation");
  send.targets.resize(item.array("targets", kMaxRanks));
  for (SendTarget& target : send.targets) {
    if (item.array("target", kMaxFields) != 3) msgpack::Reader::fail("target", "3 fields");
    target.rank = static_cast<std::int32_t>(item.uint("target_rank", kMaxRanks - 1));
    target.worker_incarnation = item.id16<Incarnation>("worker_incarnation");
    target.address = std::string(item.str("address", kMaxAddressBytes));
  }
  send.src_blocks = read_blocks(item, "src_blocks");
  send.dst_blocks = read_blocks(item, "dst_blocks");
  send.first_token = u32(item, "first_token");
  send.end_token = u32(item, "end_token");
  if (send.end_token < send.first_token)
    msgpack::Reader::fail("end_token", "not below first_token");
  send.last = item.boolean("last");
  for (std::size_t i = 9; i < num_fields; ++i) item.skip("send");  // of a later version
  return send;
}

void serve_sends(NewsChannel& channel, std::weak_ptr<Sender> sender, std::uint32_t rank) {
  channel.on("SUBS", [sender](msgpack::Reader item) {
    if (item.array("SUBS", kMaxFields) < 4) msgpack::Reader::fail("SUBS", "4 fields or more");
    const auto scheduler = item.id16<Incarnation>("scheduler_incarnation");
    const StepId step = item.uint("step");
    const SubstepId substep = item.uint("substep");
    std::vector<Send> sends = read_sends(item);
    const auto live = sender.lock();
    if (!live) return;
    try {
      (void)live->start_substep(scheduler, step, substep, std::move(sends));
    } catch (const Error&) {
      // Not taken, hence neither is any later one: the answer of freeze_step says so.
    }
  });
  channel.on("FRZN", [&channel, sender, rank](msgpack::Reader item) {
    const std::vector<Send> sends = read_sends(item);
    const auto live = sender.lock();
    try {
      if (!live) throw Error(Code::kAborted, "the sender is gone");
      live->send_frozen(channel.stats().peer, sends);
    } catch (const Error& e) {
      refuse(channel, rank, sends, e);
    }
  });
  channel.on("ABRT", [&channel, sender, rank](msgpack::Reader item) {
    if (item.array("ABRT", kMaxFields) < 2) msgpack::Reader::fail("ABRT", "2 fields or more");
    const auto key = item.id16<TransferKey>("key");
    Code code = code_from_wire(item.uint("code", kNumCodes - 1));
    if (code == Code::kOk || code == Code::kAccepted) code = Code::kAborted;
    const auto answer = [&channel, rank, key, code] {
      channel.publish("SDON", none_open(rank, key, code));
    };
    if (const auto live = sender.lock()) {
      live->cancel(key, code, "cancelled by the scheduler", answer);
    } else {
      answer();
    }
  });
  channel.on_peer_ended([sender](const Incarnation& scheduler) {
    if (const auto live = sender.lock()) live->end_scheduler(scheduler);
  });
}

}  // namespace kvt
