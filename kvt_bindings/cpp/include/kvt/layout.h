// Layouts as data: how the KV cache of one instance lies in memory, on every rank.
//
// A *layer* has an address space of its own: the concatenation, in order, of that layer's cache
// tensors on a rank. Everything kvt moves is named (layer, offset in that space). A *view* says
// what some of those bytes mean, by named dimensions (KV, BLOCK, TOKEN, HEAD, DIM) with sizes and
// byte strides; absent dimensions have size 1. A *pattern* is the list of a layer's tensors and
// views; layers that look the same share one. A *group* is a set of layers with one block list.
//
// A Layout describes a whole instance: every TP rank of a pipeline stage has tensors of the same
// shape and holds its share of the heads; every stage holds its range of layers. It is a plain,
// immutable value after validate(); any thread may read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvt/code.h"

namespace kvt {

// What one BLOCK index of a view stands for.
enum class Granularity : std::uint8_t {
  kTokens = 0,  // block_size tokens, each addressable (the TOKEN dimension is present or of size 1)
  kCell = 1,    // block_size tokens in an order that only the kernel knows: whole blocks are moved
  kState = 2,   // the state of one request after its last token: one slot, sent with that token
};

struct Axis {
  std::uint64_t size = 1;
  std::uint64_t stride_bytes = 0;  // meaningless when size is 1

  bool operator==(const Axis& other) const {
    return size == other.size && (size == 1 || stride_bytes == other.stride_bytes);
  }
};

struct View {
  std::string name;   // what it holds ("kv", "latent", "indexer", "conv", ...); peers match by name
  std::string dtype;  // compared by name
  Granularity granularity = Granularity::kTokens;
  std::string cell;               // kCell: name of the kernel / ISA order inside; else empty
  std::uint32_t item_bytes = 1;   // of one element along DIM
  std::uint32_t tensor = 0;       // index of the layer's tensor that it lies in
  std::uint64_t offset = 0;       // of element (0, 0, ...) from that tensor's first byte
  std::uint32_t kv_begin = 0;     // first KV index held here: 1 for a V tensor of its own
  std::uint32_t heads_total = 1;  // over all ranks; 1 (as for MLA): every rank holds the same
  Axis kv, block, token, head, dim;

  bool operator==(const View&) const = default;
};

struct Pattern {
  std::vector<std::uint64_t> tensor_bytes;  // extents, in the order of the address space
  std::vector<View> views;

  std::uint64_t total_bytes() const;
  // Start of tensor i in the layer's address space.
  std::uint64_t tensor_start(std::uint32_t i) const;
  bool operator==(const Pattern&) const = default;
};

struct Group {
  std::uint32_t block_tokens = 1;  // tokens per block id

  bool operator==(const Group&) const = default;
};

struct LayerEntry {
  std::uint16_t layer = 0;    // global number
  std::uint16_t group = 0;    // index into Layout::groups
  std::uint16_t pattern = 0;  // index into Layout::patterns
  std::uint16_t stage = 0;    // pipeline rank that holds it

  bool operator==(const LayerEntry&) const = default;
};

// Bounds on what a peer may send; far above any model, so that sizes cannot overflow or exhaust.
inline constexpr std::size_t kMaxLayoutBytes = 64 * 1024;
inline constexpr std::size_t kMaxLayers = 4096;
inline constexpr std::size_t kMaxGroups = 256;
inline constexpr std::size_t kMaxPatterns = 256;
inline constexpr std::size_t kMaxViews = 64;          // per pattern
inline constexpr std::size_t kMaxTensors = 64;        // per pattern
inline constexpr std::size_t kMaxNameBytes = 256;     // any string
inline constexpr std::uint32_t kMaxRanks = 4096;      // tp_size * pp_size
inline constexpr std::uint32_t kMaxHeads = 1u << 24;  // heads_total; state channels count here
inline constexpr std::uint32_t kMaxKv = 64;           // kv_begin + kv.size
inline constexpr std::uint32_t kMaxItemBytes = 1u << 20;
inline constexpr std::uint64_t kMaxExtent = 1ull << 46;  // bytes of a layer's address space

struct Layout {
  std::string model;   // identity of the weights: another model's KV is refused
  std::string scales;  // identity of KV quantisation scales; empty if none
  std::uint32_t tp_size = 1;
  std::uint32_t pp_size = 1;
  std::vector<Group> groups;
  std::vector<Pattern> patterns;
  std::vector<LayerEntry> layers;  // ascending by layer

  // Rank numbers are flattened: rank = pp_rank * tp_size + tp_rank.
  std::uint32_t num_ranks() const { return tp_size * pp_size; }
  std::uint32_t tp_rank(std::uint32_t rank) const { return rank % tp_size; }
  std::uint32_t pp_rank(std::uint32_t rank) const { return rank / tp_size; }

  // The first of `view`'s heads (model-wide number) that TP rank `tp_rank` holds; it holds
  // view.head.size of them.
  std::uint32_t head_begin(const View& view, std::uint32_t tp_rank) const;

  // nullptr if this layer is not in the layout.
  const LayerEntry* find(std::uint16_t layer) const;
  const Pattern& pattern_of(const LayerEntry& entry) const { return patterns[entry.pattern]; }

  // Throws Error(BAD_REQUEST) with the field and value unless all of this holds: bounds above;
  // views inside their tensors; no two elements of a view share a byte; heads divide over ranks;
  // token views have the group's block size; indices in range; layers ascending.
  void validate() const;

  // Canonical bytes (equal layouts, equal bytes) and their 64-bit hash, the *fingerprint*.
  std::vector<std::uint8_t> serialize() const;
  std::uint64_t fingerprint() const;

  // From a peer's bytes: bounded, validated. Throws Error(BAD_REQUEST).
  static std::shared_ptr<const Layout> parse(std::span<const std::uint8_t> bytes);

  bool operator==(const Layout&) const = default;
};

// One layout out of those of the pipeline stages, each describing its own layers. Throws
// Error(INCOMPATIBLE) naming what differs between them, and for a layer held by two stages.
Layout merge_stages(std::span<const std::shared_ptr<const Layout>> stages);

// Every reason why no KV can go from `source` to `target`, each naming the two values; empty if
// they fit: model, scales, layers, views, dtypes, element counts, and for cells the block size and
// the kernel.
std::vector<std::string> incompatibilities(const Layout& source, const Layout& target);

// Throws Error(INCOMPATIBLE) with all of them.
void check_compatible(const Layout& source, const Layout& target);

}  // namespace kvt
