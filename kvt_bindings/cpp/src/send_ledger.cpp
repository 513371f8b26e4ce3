#include "kvt/send_ledger.h"

#include <algorithm>
#include <utility>

namespace kvt {
namespace {

using Kind = LedgerEffect::Kind;

void append(BlockLists& to, const BlockLists& more) {
  if (to.size() < more.size()) to.resize(more.size());
  for (std::size_t i = 0; i < more.size(); ++i) {
    to[i].insert(to[i].end(), more[i].begin(), more[i].end());
  }
}

std::string range_text(const TokenRange& r) {
  return "[" + std::to_string(r.first) + ", " + std::to_string(r.end) + ")";
}

}  // namespace

std::size_t SendLedger::attach(PartId id, const SharedSend& send, const Incarnation& scheduler,
                               double now_s, LedgerEffects& out) {
  const TransferKey& key = send->key;
  const auto forget = [&] { out.push_back({.kind = Kind::kForget, .part = id}); };
  auto it = transfers_.find(key);
  if (it == transfers_.end()) {
    if (ended_.contains(key)) {
      ++counts_.num_late;
      forget();
      return 0;
    }
    if (send->is_delta) {
      ++counts_.num_unknown;
      forget();
      return 0;
    }
    if (const auto mark = marks_.find(key); mark != marks_.end() && now_s < mark->second.until_s) {
      ++counts_.num_marks_hit;
      forget();
      return end_unopened(*send, Status(mark->second.why), out);
    }
    Transfer made;
    made.scheduler = scheduler;
    made.target_instance = send->target_instance;
    made.target_incarnation = send->target_incarnation;
    made.src_blocks = std::make_shared<const BlockLists>(send->src_blocks);
    made.dst_blocks = std::make_shared<const BlockLists>(send->dst_blocks);
    made.started_s = now_s;
    it = transfers_.emplace(key, std::move(made)).first;
    by_age_.emplace_back(now_s, key);
  }
  Transfer& transfer = it->second;
  const bool is_new = transfer.parts.empty();
  const TokenRange tokens{send->first_token, send->end_token};

  if (!is_new) {
    for (const PartId other_id : transfer.parts) {
      const Part& other = parts_.at(other_id);
      const bool overlaps = tokens.first < other.tokens.end && other.tokens.first < tokens.end;
      const bool repeats = tokens == other.tokens && send->last == other.last;
      if (!overlaps && !repeats) continue;
      forget();
      if (repeats || (tokens.first >= other.tokens.first && tokens.end <= other.tokens.end)) {
        ++counts_.num_repeated;
      } else {
        fail_transfer(key,
                      {Code::kBadRequest, "tokens " + range_text(tokens) + " overlap " +
                                              range_text(other.tokens) + " of the same transfer"},
                      out);
      }
      return 0;
    }
    if (transfer.last_seen && (send->last || is_whole(transfer))) {
      forget();
      fail_transfer(
          key,
          {Code::kBadRequest, "tokens " + range_text(tokens) + " after the transfer's last send"},
          out);
      return 0;
    }
    // A delta adds to the lists; a whole send brings them from token 0, as far as they are now.
    const auto extend = [&](std::shared_ptr<const BlockLists>& lists, const BlockLists& more) {
      if (send->is_delta) {
        auto longer = std::make_shared<BlockLists>(*lists);
        append(*longer, more);
        lists = std::move(longer);
      } else {
        lists = std::make_shared<const BlockLists>(more);
      }
    };
    extend(transfer.src_blocks, send->src_blocks);
    extend(transfer.dst_blocks, send->dst_blocks);
  }

  ++counts_.num_attached;
  transfer.parts.push_back(id);
  transfer.last_seen = transfer.last_seen || send->last;
  if (send->last) transfer.end_of_all = send->end_token;
  if (send->transfer_end_token > transfer.end_of_all) {
    transfer.end_of_all = send->transfer_end_token;
  }
  parts_.emplace(
      id, Part{key, tokens, send->last, false, transfer.src_blocks, transfer.dst_blocks, {}});
  if (!is_new) {
    for (const LegId leg : std::vector<LegId>(transfer.legs)) {
      legs_.at(leg).parts.emplace(id, LegPart{});
      if (legs_.at(leg).state != LegState::kConnecting) plan_parts(leg, legs_.at(leg), out);
    }
    return 0;
  }

  for (const SendTarget& target : send->targets) {
    const LegId leg_id = next_leg_++;
    ++counts_.num_legs_opened;
    Leg leg;
    leg.key = key;
    leg.target = target;
    leg.parts.emplace(id, LegPart{});
    legs_.emplace(leg_id, std::move(leg));
    transfer.legs.push_back(leg_id);
  }
  const std::vector<LegId> made = transfer.legs;
  const bool is_empty = send->last && tokens.first == tokens.end;
  for (const LegId leg : made) {
    if (is_empty) {  // the receiver has everything already
      complete(leg, {}, send->end_token, out);
      continue;
    }
    const SendTarget& target = legs_.at(leg).target;
    out.push_back({.kind = Kind::kConnect,
                   .leg = leg,
                   .peer = {send->target_instance, send->target_incarnation,
                            target.worker_incarnation, target.rank, target.address}});
  }
  if (made.empty()) {
    transfers_.erase(key);
    parts_.erase(id);
    forget();
  }
  return made.size();
}

std::size_t SendLedger::attach_failed(const SharedSend& send, const Status& why,
                                      LedgerEffects& out) {
  if (transfers_.contains(send->key)) {
    fail_transfer(send->key, why, out);
    return 0;
  }
  if (send->is_delta || ended_.contains(send->key)) {
    ++(send->is_delta ? counts_.num_unknown : counts_.num_late);
    return 0;
  }
  return end_unopened(*send, why, out);
}

// --- the timeline's word ---

void SendLedger::layer_ready(PartId id, std::uint16_t layer, LedgerEffects& out) {
  const auto it = parts_.find(id);
  if (it == parts_.end()) return;
  it->second.ready.push_back(layer);
  for (const LegId leg : std::vector<LegId>(transfers_.at(it->second.key).legs)) {
    send_ready(leg, legs_.at(leg), id, out);
  }
}

void SendLedger::sealed(PartId id, LedgerEffects& out) {
  const auto it = parts_.find(id);
  if (it == parts_.end()) return;
  it->second.sealed = true;
  for (const LegId leg : std::vector<LegId>(transfers_.at(it->second.key).legs)) settle(leg, out);
}

void SendLedger::fail_part(PartId id, const Status& why, LedgerEffects& out) {
  const auto it = parts_.find(id);
  if (it != parts_.end()) fail_transfer(TransferKey(it->second.key), why, out);
}

// --- connections and plans ---

void SendLedger::connected(LegId id, ConnectionId connection, bool is_ready, LedgerEffects& out) {
  const auto it = legs_.find(id);
  if (it == legs_.end()) return;
  it->second.connection = connection;
  if (!is_ready) return;
  it->second.state = LegState::kReady;
  plan_parts(id, it->second, out);
}

void SendLedger::connection_ready(ConnectionId connection, LedgerEffects& out) {
  for (auto& [id, leg] : legs_) {
    if (leg.connection != connection || leg.state != LegState::kConnecting) continue;
    leg.state = LegState::kReady;
    plan_parts(id, leg, out);
  }
}

void SendLedger::connection_lost(ConnectionId connection, const Status& why, LedgerEffects& out) {
  std::vector<LegId> on_it;
  for (const auto& [id, leg] : legs_) {
    if (leg.connection == connection) on_it.push_back(id);
  }
  for (const LegId id : on_it) complete(id, why, 0, out);
}

void SendLedger::plan_parts(LegId id, Leg& leg, LedgerEffects& out) {
  for (auto& [part_id, leg_part] : leg.parts) {
    if (leg_part.plan != nullptr || leg_part.is_asked) continue;
    leg_part.is_asked = true;
    const Part& part = parts_.at(part_id);
    out.push_back(
        {.kind = Kind::kPlan,
         .leg = id,
         .part = part_id,
         .job = {leg.target.rank, part.src_blocks, part.dst_blocks, part.tokens, part.last}});
  }
}

void SendLedger::planned(LegId id, PartId part, SharedPlan plan, const Status& status,
                         LedgerEffects& out) {
  const auto it = legs_.find(id);
  if (it == legs_.end() || it->second.state == LegState::kCancelling) return;
  if (!status.ok()) {
    fail_leg(id, status, out);
    return;
  }
  Leg& leg = it->second;
  leg.parts.at(part).plan = std::move(plan);
  if (leg.state == LegState::kReady && !leg.parts.at(part).plan->parts.empty()) {
    const Transfer& transfer = transfers_.at(leg.key);
    TransferOpen open;
    open.key = leg.key;
    open.sender_incarnation = transfer.scheduler;
    // The range is told only if it is known whole; otherwise the receiver's grant decides.
    if (transfer.end_of_all > 0) {
      open.first_token = static_cast<std::uint32_t>(range_of(transfer).first);
      open.end_token = transfer.end_of_all;
    }
    open.crc = crc_;
    leg.state = LegState::kOpen;
    out.push_back({.kind = Kind::kOpen, .leg = id, .open = open});
  }
  send_ready(id, leg, part, out);
  settle(id, out);
}

void SendLedger::send_ready(LegId id, Leg& leg, PartId part_id, LedgerEffects& out) {
  if (leg.state == LegState::kCancelling) return;
  LegPart& leg_part = leg.parts.at(part_id);
  if (leg_part.plan == nullptr) return;
  const Part& part = parts_.at(part_id);
  for (; leg_part.num_handled < part.ready.size(); ++leg_part.num_handled) {
    const std::uint16_t layer = part.ready[leg_part.num_handled];
    const PlanPart* bytes = leg_part.plan->find(layer);
    if (bytes == nullptr) continue;  // this rank has none of it for that rank
    ++leg.num_layers_sent;
    out.push_back({.kind = Kind::kSend,
                   .leg = id,
                   .layer = {layer, static_cast<std::uint32_t>(part.tokens.first),
                             static_cast<std::uint32_t>(part.tokens.end),
                             SharedRuns(leg_part.plan, &bytes->runs)}});
  }
}

void SendLedger::settle(LegId id, LedgerEffects& out) {
  Leg& leg = legs_.at(id);
  if (leg.state != LegState::kReady && leg.state != LegState::kOpen) return;
  const Transfer& transfer = transfers_.at(leg.key);
  if (!transfer.last_seen || !is_whole(transfer)) return;
  for (const auto& [part_id, leg_part] : leg.parts) {
    const Part& part = parts_.at(part_id);
    if (!part.sealed || leg_part.plan == nullptr || leg_part.num_handled < part.ready.size()) {
      return;
    }
  }
  if (leg.state == LegState::kReady) {  // not a byte of it is for that rank
    complete(id, {}, static_cast<std::uint32_t>(range_of(transfer).end), out);
    return;
  }
  leg.state = LegState::kEnding;
  out.push_back({.kind = Kind::kEnd, .leg = id});
}

// --- what follows from the parts ---

TokenRange SendLedger::range_of(const Transfer& transfer) const {
  TokenRange range = parts_.at(transfer.parts.front()).tokens;
  for (const PartId id : transfer.parts) {
    const TokenRange& r = parts_.at(id).tokens;
    range.first = std::min(range.first, r.first);
    range.end = std::max(range.end, r.end);
  }
  return range;
}

bool SendLedger::is_whole(const Transfer& transfer) const {
  const TokenRange all = range_of(transfer);
  std::uint64_t num_tokens = 0;  // parts do not overlap
  for (const PartId id : transfer.parts) {
    num_tokens += parts_.at(id).tokens.end - parts_.at(id).tokens.first;
  }
  return num_tokens == all.end - all.first;
}

}  // namespace kvt
