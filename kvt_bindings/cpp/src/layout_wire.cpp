// Layout to canonical bytes and back: "KVL1", then LEB128 integers and length-prefixed strings in
// the order of the structs' fields.
#include <algorithm>
#include <array>

#include "kvt/layout.h"

namespace kvt {
namespace {

constexpr std::array<std::uint8_t, 4> kMagic = {'K', 'V', 'L', '1'};

class Writer {
 public:
  Writer() { bytes_.assign(kMagic.begin(), kMagic.end()); }

  void number(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<std::uint8_t>(value | 0x80));
    bytes_.push_back(static_cast<std::uint8_t>(value));
  }
  void text(const std::string& value) {
    number(value.size());
    bytes_.insert(bytes_.end(), value.begin(), value.end());
  }
  // The stride of a dimension of size 1 means nothing, so it is not written.
  void axis(const Axis& a) {
    number(a.size);
    if (a.size != 1) number(a.stride_bytes);
  }
  std::vector<std::uint8_t> take() { return std::move(bytes_); }

 private:
  std::vector<std::uint8_t> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> bytes) : rest_(bytes) {
    if (bytes.size() > kMaxLayoutBytes) fail("longer than 64 KiB");
    if (bytes.size() < 4 || !std::equal(kMagic.begin(), kMagic.end(), bytes.begin())) {
      fail("does not begin with KVL1");
    }
    rest_ = rest_.subspan(4);
  }

  std::uint64_t number(std::uint64_t max = UINT64_MAX) {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 63; shift += 7) {
      if (rest_.empty()) fail("ends early");
      const std::uint8_t b = rest_[0];
      rest_ = rest_.subspan(1);
      value |= std::uint64_t{b & 0x7fu} << shift;
      if ((b & 0x80) == 0) {
        if (value > max) fail("number out of range");
        return value;
      }
    }
    fail("number too long");
  }
  template <class T>
  T as(std::uint64_t max = static_cast<T>(~T{0})) {
    return static_cast<T>(number(max));
  }
  std::string text() {
    const std::size_t n = number(kMaxNameBytes);
    if (n > rest_.size()) fail("ends early");
    std::string value(rest_.begin(), rest_.begin() + static_cast<std::ptrdiff_t>(n));
    rest_ = rest_.subspan(n);
    return value;
  }
  Axis axis() {
    Axis a;
    a.size = number();
    if (a.size != 1) a.stride_bytes = number();
    return a;
  }
  bool at_end() const { return rest_.empty(); }

  [[noreturn]] static void fail(const char* what) {
    throw Error(Code::kBadRequest, std::string("layout bytes: ") + what);
  }

 private:
  std::span<const std::uint8_t> rest_;
};

}  // namespace

std::vector<std::uint8_t> Layout::serialize() const {
  Writer w;
  w.text(model);
  w.text(scales);
  w.number(tp_size);
  w.number(pp_size);
  w.number(groups.size());
  for (const Group& g : groups) w.number(g.block_tokens);
  w.number(patterns.size());
  for (const Pattern& p : patterns) {
    w.number(p.tensor_bytes.size());
    for (const std::uint64_t bytes : p.tensor_bytes) w.number(bytes);
    w.number(p.views.size());
    for (const View& v : p.views) {
      w.text(v.name);
      w.text(v.dtype);
      w.number(static_cast<std::uint8_t>(v.granularity));
      w.text(v.cell);
      w.number(v.item_bytes);
      w.number(v.tensor);
      w.number(v.offset);
      w.number(v.kv_begin);
      w.number(v.heads_total);
      for (const Axis* a : {&v.kv, &v.block, &v.token, &v.head, &v.dim}) w.axis(*a);
    }
  }
  // Layers as runs of consecutive numbers that are otherwise alike.
  std::vector<std::pair<LayerEntry, std::uint32_t>> runs;
  for (const LayerEntry& e : layers) {
    if (!runs.empty()) {
      auto& [head, count] = runs.back();
      if (e.layer == head.layer + count && e.group == head.group && e.pattern == head.pattern &&
          e.stage == head.stage) {
        ++count;
        continue;
      }
    }
    runs.emplace_back(e, 1);
  }
  w.number(runs.size());
  for (const auto& [head, count] : runs) {
    w.number(head.layer);
    w.number(count);
    w.number(head.group);
    w.number(head.pattern);
    w.number(head.stage);
  }
  return w.take();
}

std::shared_ptr<const Layout> Layout::parse(std::span<const std::uint8_t> bytes) {
  Reader r(bytes);
  auto layout = std::make_shared<Layout>();
  layout->model = r.text();
  layout->scales = r.text();
  layout->tp_size = r.as<std::uint32_t>();
  layout->pp_size = r.as<std::uint32_t>();
  layout->groups.resize(r.number(kMaxGroups));
  for (Group& g : layout->groups) g.block_tokens = r.as<std::uint32_t>();
  layout->patterns.resize(r.number(kMaxPatterns));
  for (Pattern& p : layout->patterns) {
    p.tensor_bytes.resize(r.number(kMaxTensors));
    for (std::uint64_t& n : p.tensor_bytes) n = r.number();
    p.views.resize(r.number(kMaxViews));
    for (View& v : p.views) {
      v.name = r.text();
      v.dtype = r.text();
      v.granularity = static_cast<Granularity>(r.as<std::uint8_t>(2));
      v.cell = r.text();
      v.item_bytes = r.as<std::uint32_t>();
      v.tensor = r.as<std::uint32_t>();
      v.offset = r.number();
      v.kv_begin = r.as<std::uint32_t>();
      v.heads_total = r.as<std::uint32_t>();
      for (Axis* a : {&v.kv, &v.block, &v.token, &v.head, &v.dim}) *a = r.axis();
    }
  }
  const std::uint64_t num_runs = r.number(kMaxLayers);
  for (std::uint64_t i = 0; i < num_runs; ++i) {
    LayerEntry e;
    e.layer = r.as<std::uint16_t>();
    const std::uint64_t count = r.number(kMaxLayers - layout->layers.size());
    e.group = r.as<std::uint16_t>();
    e.pattern = r.as<std::uint16_t>();
    e.stage = r.as<std::uint16_t>();
    if (count == 0 || count > 0x10000u - e.layer) Reader::fail("layer run out of range");
    for (std::uint64_t k = 0; k < count; ++k, ++e.layer) layout->layers.push_back(e);
  }
  if (!r.at_end()) Reader::fail("bytes after the end");
  layout->validate();
  const auto canonical = layout->serialize();
  if (!std::equal(canonical.begin(), canonical.end(), bytes.begin(), bytes.end())) {
    Reader::fail("not in canonical form");
  }
  return layout;
}

std::uint64_t Layout::fingerprint() const {
  // FNV-1a with a final mix: told apart by accident only; trust comes from the connection.
  std::uint64_t h = 0xCBF29CE484222325ull;
  for (const std::uint8_t b : serialize()) h = (h ^ b) * 0x100000001B3ull;
  h ^= h >> 33;
  h *= 0xFF51AFD7ED558CCDull;
  return h ^ (h >> 33);
}

}  // namespace kvt
