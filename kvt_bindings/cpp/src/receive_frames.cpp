// What a receiver does with each frame: all of it is checked here before a byte may land.
#include <string>

#include "receive_connection.h"

namespace kvt {
namespace {

constexpr std::uint64_t kMinMeanPieceBytes = 8;  // one element of any head is larger

std::string show_range(std::uint32_t first, std::uint32_t end) {
  return "[" + std::to_string(first) + ", " + std::to_string(end) + ")";
}

}  // namespace

bool ReceiveConnection::on_hello(wire::Body body) {
  wire::Hello hello;
  std::string why;
  wire::Welcome welcome;
  const auto refuse = [&](Code code, std::string detail) {
    welcome.code = code;
    welcome.detail = std::move(detail);
    wire::append(out_, welcome);
    return give_up(code, welcome.detail);
  };
  if (!wire::decode(body, &hello, &why)) {
    shared_->counters.violations.fetch_add(1);
    return refuse(Code::kBadRequest, why);
  }
  if (hello.min_version > wire::kDataVersion || hello.max_version < wire::kDataVersion) {
    return refuse(Code::kIncompatible, "data protocol " + std::to_string(hello.min_version) +
                                           " to " + std::to_string(hello.max_version) +
                                           " offered, " + std::to_string(wire::kDataVersion) +
                                           " spoken here");
  }
  const auto own_rank = shared_->cache->rank();
  if (static_cast<std::uint32_t>(hello.target_rank) != own_rank) {
    return refuse(Code::kIncompatible, "rank " + std::to_string(hello.target_rank) +
                                           " was meant, this is rank " + std::to_string(own_rank));
  }
  std::shared_ptr<const Layout> source;
  try {
    source = Layout::parse(hello.layout);
    planner_ = shared_->planners.get(source, shared_->cache->shared_layout());
  } catch (const Error& e) {
    return refuse(e.code(), e.what());
  }
  source_rank_ = static_cast<std::uint32_t>(hello.source_rank);
  if (source_rank_ >= source->num_ranks()) {
    return refuse(Code::kBadRequest, "source rank " + std::to_string(source_rank_) + " of " +
                                         std::to_string(source->num_ranks()));
  }
  TransportContext context;
  context.socket = socket_.get();
  context.memory = &shared_->memory;
  context.device_memory = shared_->config.device_memory.get();
  std::string note;
  const auto add_note = [&note](const std::string& reason) {
    note += (note.empty() ? "" : "; ") + reason;
  };
  const TransportType* chosen = nullptr;
  for (const wire::TransportKind kind : shared_->config.transports) {
    if ((hello.transports & wire::transport_bit(kind)) == 0) {
      add_note(std::string(wire::transport_name(kind)) + ": not offered by the sender");
      continue;
    }
    const TransportType& type = transport_type(kind);
    placer_ = type.accept(hello, context, &why);
    if (placer_) {
      chosen = &type;
      break;
    }
    add_note(why);
  }
  if (chosen == nullptr) return refuse(Code::kIncompatible, "no common transport: " + note);
  transport_ = chosen;
  welcome.transport = chosen->kind();
  welcome.detail = note;
  welcome.layout = shared_->layout_bytes;
  wire::append(out_, welcome);
  const std::lock_guard held(mutex_);
  view_.source_rank = source_rank_;
  view_.transport = wire::transport_name(chosen->kind());
  view_.note = note;
  return true;
}

void ReceiveConnection::refuse_open(std::uint32_t transfer, Code code, const std::string& detail) {
  shared_->counters.refused_opens.fetch_add(1);
  post({transfer, code, 0, detail});
}

bool ReceiveConnection::on_open(wire::Body body) {
  wire::Open open;
  std::string why;
  if (!wire::decode(body, &open, &why) || open.transfer <= last_transfer_) {
    shared_->counters.violations.fetch_add(1);
    return give_up(Code::kBadRequest, why.empty() ? "OPEN: handle used before" : why);
  }
  last_transfer_ = open.transfer;
  if (carried_.size() >= shared_->config.max_open_per_connection) {
    refuse_open(open.transfer, Code::kBusy, "too many transfers on one connection");
    return true;
  }
  const std::shared_ptr<Grant> grant = shared_->grants.find(open.key);
  if (grant == nullptr) {
    const bool over = shared_->grants.is_marked(open.key);
    refuse_open(open.transfer, over ? Code::kGone : Code::kNotFound,
                over ? "the transfer is over here" : "no grant for this transfer");
    return true;
  }
  // A refusal below must not hurt the transfer itself: its real sender may still come.
  const GrantSpec& spec = grant->spec;
  if (spec.sender_instance != sender_.instance ||
      spec.sender_incarnation != open.sender_incarnation) {
    shared_->counters.violations.fetch_add(1);
    refuse_open(open.transfer, Code::kUnauthorized, "the grant names another sender");
    return true;
  }
  SourceSlot* const slot = grant->slot_of(source_rank_);
  if (slot == nullptr) {
    shared_->counters.violations.fetch_add(1);
    refuse_open(open.transfer, Code::kBadRequest,
                "nothing is expected from rank " + std::to_string(source_rank_));
    return true;
  }
  const bool ranged = open.end_token != 0;
  if (ranged && (open.first_token != spec.first_token || open.end_token > spec.end_token)) {
    shared_->counters.violations.fetch_add(1);
    refuse_open(open.transfer, Code::kBadRequest,
                "tokens " + show_range(open.first_token, open.end_token) + " opened, " +
                    show_range(spec.first_token, spec.end_token) + " granted");
    return true;
  }
  const std::uint32_t end_token = ranged ? open.end_token : spec.end_token;
  Plan expected;
  try {
    expected = planner_->expected(source_rank_, shared_->cache->rank(), spec.block_ids,
                                  {spec.first_token, end_token});
  } catch (const Error& e) {
    refuse_open(open.transfer, e.code(), e.what());
    return true;
  }
  Carried carried;
  carried.grant = grant;
  for (const auto& candidate : grant->slots) {
    if (candidate.get() == slot) carried.slot = candidate;
  }
  carried.crc = (open.flags & wire::kOpenFlagCrc) != 0;
  const bool nothing = expected.parts.empty();
  if (!slot->attach(weak_from_this(), open.transfer, std::move(expected), end_token, &why)) {
    refuse_open(open.transfer, slot->ended() ? Code::kGone : Code::kBusy, why);
    return true;
  }
  if (placer_->is_asynchronous()) {
    const std::unique_lock held = slot->lock();
    if (!slot->ended()) slot->quiesce = [placer = placer_.get()] { return placer->settle(); };
  }
  Carried& kept = carried_.emplace(open.transfer, std::move(carried)).first->second;
  shared_->start_clocks(spec, std::span(&kept.slot, 1));
  num_open_.store(carried_.size(), std::memory_order_relaxed);
  if (nothing) completed(open.transfer, kept);
  return true;
}

bool ReceiveConnection::on_blocks(wire::Body body) {
  wire::Blocks frame;
  std::string why;
  if (!wire::decode(body, &frame, &why)) {
    shared_->counters.violations.fetch_add(1);
    return give_up(Code::kBadRequest, why);
  }
  if (frame.chunk.transfer > last_transfer_) {
    shared_->counters.violations.fetch_add(1);
    return give_up(Code::kBadRequest, "DESC for a transfer that was never opened");
  }
  payload_left_ = transport_->carries_payload() ? frame.payload_bytes : 0;
  incoming_ = {frame.chunk.transfer, frame.chunk.layer, false};
  phase_ = Phase::kPayload;
  Carried* const carried = find(frame.chunk.transfer);
  if (carried != nullptr && !carried->slot->is_ending()) {
    incoming_.landing = admit_blocks(*carried, frame);
  }
  return true;
}

// Whether this frame's bytes may land.
bool ReceiveConnection::admit_blocks(Carried& carried, const wire::Blocks& frame) {
  const wire::Chunk& chunk = frame.chunk;
  const auto refuse = [&](const std::string& what) {
    violation(carried, "layer " + std::to_string(chunk.layer) + ", tokens " +
                           show_range(chunk.first_token, chunk.end_token) + ": " + what);
    return false;
  };
  const bool begun = carried.chunk.has_value();
  if (begun && *carried.chunk != chunk) return refuse("the chunk before it was not ended");
  const GrantSpec& spec = carried.grant->spec;
  if (chunk.first_token < spec.first_token || chunk.end_token > carried.slot->end_tokens()) {
    return refuse("outside the granted tokens");
  }
  const PlanPart* const part = carried.slot->part_of(chunk.layer);
  if (part == nullptr) return refuse("no byte of this layer is expected from this rank");
  std::string why;
  const Intervals* const intervals = carried.check.check(frame.blocks, part->runs, &why);
  if (intervals == nullptr) return refuse(why);
  LayerCoverage& coverage = carried.slot->coverage(chunk.layer);
  switch (coverage.overlap(*intervals)) {
    case LayerCoverage::Overlap::kPartly:
      return refuse("overlaps what was received before");
    case LayerCoverage::Overlap::kInside:
      if (begun && !carried.chunk_is_repeat) return refuse("repeats itself");
      shared_->counters.repeats.fetch_add(1);
      carried.chunk = chunk;
      carried.chunk_is_repeat = true;
      return false;
    case LayerCoverage::Overlap::kNone:
      break;
  }
  // What is remembered stays in proportion to what is transferred, however it is cut up.
  if (coverage.num_intervals() > part->bytes / kMinMeanPieceBytes + wire::kMaxBlocksPerFrame) {
    return refuse("is cut into too many pieces");
  }
  if (begun && carried.chunk_is_repeat) return refuse("repeats in part what was received before");
  if (!begun) carried.chunk_crc = 0;
  std::optional<std::uint32_t> seed;
  if (carried.crc) seed = carried.chunk_crc;
  const Status started = placer_->begin(frame.blocks, seed);
  if (!started.ok()) return refuse(started.detail);
  coverage.add_pending(*intervals);
  carried.chunk = chunk;
  carried.chunk_is_repeat = false;
  return true;
}

bool ReceiveConnection::on_chunk_end(wire::Body body) {
  wire::ChunkEnd end;
  std::string why;
  if (!wire::decode(body, &end, &why)) {
    shared_->counters.violations.fetch_add(1);
    return give_up(Code::kBadRequest, why);
  }
  Carried* const carried = find(end.chunk.transfer);
  if (carried == nullptr || carried->slot->is_ending()) return true;
  const std::string where = "layer " + std::to_string(end.chunk.layer) + ": ";
  if (!carried->chunk || *carried->chunk != end.chunk) {
    violation(*carried, where + "end of a chunk that was not begun");
    return true;
  }
  carried->chunk.reset();
  if (carried->chunk_is_repeat) return true;
  if (carried->crc && carried->chunk_crc != end.crc32c) {
    shared_->counters.corrupt.fetch_add(1);
    fail(*carried, Code::kCorrupt,
         where + "checksum of the placed bytes differs from the sender's");
    return true;
  }
  if (placer_->is_asynchronous()) {
    Status settled;
    {
      const std::unique_lock held = carried->slot->lock();
      if (carried->slot->may_place()) settled = placer_->settle();
    }
    if (!settled.ok()) {
      fail(*carried, settled.code, where + settled.detail);
      return give_up(settled.code, where + settled.detail);
    }
  }
  if (carried->slot->commit(end.chunk.layer)) completed(end.chunk.transfer, *carried);
  return true;
}

// Every byte of the slice has landed.
void ReceiveConnection::completed(std::uint32_t transfer, Carried& carried) {
  if (transport_->confirms()) {
    carried.complete = true;
    carried.slot->set_confirming();
    wire::append_ask_held(out_, transfer);
    return;
  }
  (void)shared_->grants.finish(*carried.grant, *carried.slot, Code::kOk, carried.slot->end_tokens(),
                               {});
}

bool ReceiveConnection::on_held(wire::Body body) {
  wire::Held held;
  std::string why;
  if (!wire::decode(body, &held, &why)) {
    shared_->counters.violations.fetch_add(1);
    return give_up(Code::kBadRequest, why);
  }
  Carried* const carried = find(held.transfer);
  if (carried == nullptr) return true;  // it ended while the answer was on its way
  if (!carried->complete) {
    violation(*carried, "HELD without having been asked");
  } else if (!held.held) {
    fail(*carried, Code::kAborted, "the source was not held until the last read");
  } else {
    (void)shared_->grants.finish(*carried->grant, *carried->slot, Code::kOk,
                                 carried->slot->end_tokens(), {});
  }
  return true;
}

bool ReceiveConnection::on_end(wire::Body body) {
  std::uint32_t transfer = 0;
  std::string why;
  if (!wire::decode_transfer(body, &transfer, &why)) {
    shared_->counters.violations.fetch_add(1);
    return give_up(Code::kBadRequest, why);
  }
  Carried* const carried = find(transfer);
  if (carried == nullptr || carried->complete || carried->slot->is_ending()) return true;
  fail(*carried, Code::kBadRequest,
       "the sender ended the transfer early: " + carried->slot->describe_missing());
  return true;
}

bool ReceiveConnection::on_cancel(wire::Body body) {
  wire::Result result;
  std::string why;
  if (!wire::decode(body, &result, &why)) {
    shared_->counters.violations.fetch_add(1);
    return give_up(Code::kBadRequest, why);
  }
  Carried* const carried = find(result.transfer);
  if (carried == nullptr) return true;
  const Code code = result.code == Code::kOk ? Code::kAborted : result.code;
  fail(*carried, code, "given up by the sender: " + result.detail);
  return true;
}

}  // namespace kvt
