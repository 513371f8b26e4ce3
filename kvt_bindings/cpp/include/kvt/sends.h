// What the scheduler asks a worker to send: the tokens of one request, to the ranks of one
// receiver.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvt/ids.h"
#include "kvt/planner.h"

namespace kvt {

struct SendTarget {
  std::int32_t rank = 0;
  Incarnation worker_incarnation;
  std::string address;  // of that worker's server
};

// Sent as a whole by submit_send, in a substep, or frozen. A transfer may consist of several, with
// token ranges that do not overlap; the first one opens it and the one with `last` ends it.
struct Send {
  TransferKey key;
  std::string target_instance;
  Incarnation target_incarnation;
  std::vector<SendTarget> targets;
  BlockLists src_blocks;
  BlockLists dst_blocks;
  std::uint32_t first_token = 0;
  std::uint32_t end_token = 0;
  bool last = true;
  // The end of the whole transfer, if it is known to be later than `end_token`; 0: not known.
  std::uint32_t transfer_end_token = 0;
  // Continues a transfer that another send opened: `targets` are the transfer's, and the block
  // lists hold only what is new, to be appended to the transfer's lists.
  bool is_delta = false;
};

using SharedSend = std::shared_ptr<const Send>;

}  // namespace kvt
