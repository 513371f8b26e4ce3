// Layouts, plans and rank memory.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "kvt/crc32c.h"
#include "kvt/layout.h"
#include "kvt/planner.h"
#include "kvt/rank_cache.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvt_python {
namespace {

using AxisTuple = std::pair<std::uint64_t, std::uint64_t>;  // size, stride in bytes
using LayerTuple = std::tuple<std::uint16_t, std::uint16_t, std::uint16_t, std::uint16_t>;
using PatternTuple = std::pair<std::vector<std::uint64_t>, std::vector<kvt::View>>;
using MemoryTuple =
    std::pair<std::uint16_t, std::vector<AxisTuple>>;  // (layer, [(address, bytes)])

kvt::Axis axis(const AxisTuple& a) {
  return {a.first, a.second};
}
AxisTuple tuple(const kvt::Axis& a) {
  return {a.size, a.stride_bytes};
}

kvt::Granularity granularity(const std::string& name) {
  if (name == "tokens") return kvt::Granularity::kTokens;
  if (name == "cell") return kvt::Granularity::kCell;
  if (name == "state") return kvt::Granularity::kState;
  throw kvt::Error(kvt::Code::kBadRequest,
                   "granularity \"" + name + "\" is not tokens, cell or state");
}

const char* granularity_name(kvt::Granularity g) {
  static constexpr const char* kNames[] = {"tokens", "cell", "state"};
  return kNames[static_cast<int>(g)];
}

nb::bytes runs_bytes(const kvt::PlanPart& part) {
  static_assert(sizeof(kvt::Run) == 24);
  return nb::bytes(part.runs.data(), part.runs.size() * sizeof(kvt::Run));
}

std::shared_ptr<kvt::Layout> unconst(std::shared_ptr<const kvt::Layout> layout) {
  return std::const_pointer_cast<kvt::Layout>(std::move(layout));  // Python sees no setter
}

void bind_layouts(nb::module_& m) {
  nb::class_<kvt::View>(m, "View", "What some bytes of a layer mean, by named dimensions.")
      .def(
          "__init__",
          [](kvt::View* self, std::string name, std::string dtype, std::uint32_t item_bytes,
             AxisTuple kv, AxisTuple block, AxisTuple token, AxisTuple head, AxisTuple dim,
             std::uint32_t heads_total, std::uint32_t tensor, std::uint64_t offset,
             std::uint32_t kv_begin, const std::string& granularity_text, std::string cell) {
            new (self) kvt::View{.name = std::move(name),
                                 .dtype = std::move(dtype),
                                 .granularity = granularity(granularity_text),
                                 .cell = std::move(cell),
                                 .item_bytes = item_bytes,
                                 .tensor = tensor,
                                 .offset = offset,
                                 .kv_begin = kv_begin,
                                 .heads_total = heads_total,
                                 .kv = axis(kv),
                                 .block = axis(block),
                                 .token = axis(token),
                                 .head = axis(head),
                                 .dim = axis(dim)};
          },
          nb::kw_only(), "name"_a, "dtype"_a, "item_bytes"_a, "kv"_a = AxisTuple(1, 0),
          "block"_a = AxisTuple(1, 0), "token"_a = AxisTuple(1, 0), "head"_a = AxisTuple(1, 0),
          "dim"_a = AxisTuple(1, 0), "heads_total"_a = 1, "tensor"_a = 0, "offset"_a = 0,
          "kv_begin"_a = 0, "granularity"_a = "tokens", "cell"_a = "",
          "Axes are (size, stride in bytes); an absent dimension is (1, 0).")
      .def_ro("name", &kvt::View::name)
      .def_ro("dtype", &kvt::View::dtype)
      .def_ro("cell", &kvt::View::cell)
      .def_ro("item_bytes", &kvt::View::item_bytes)
      .def_ro("tensor", &kvt::View::tensor)
      .def_ro("offset", &kvt::View::offset)
      .def_ro("kv_begin", &kvt::View::kv_begin)
      .def_ro("heads_total", &kvt::View::heads_total)
      .def_prop_ro("granularity",
                   [](const kvt::View& v) { return granularity_name(v.granularity); })
      .def_prop_ro("kv", [](const kvt::View& v) { return tuple(v.kv); })
      .def_prop_ro("block", [](const kvt::View& v) { return tuple(v.block); })
      .def_prop_ro("token", [](const kvt::View& v) { return tuple(v.token); })
      .def_prop_ro("head", [](const kvt::View& v) { return tuple(v.head); })
      .def_prop_ro("dim", [](const kvt::View& v) { return tuple(v.dim); });

  nb::class_<kvt::Layout>(m, "Layout", "How the cache of one instance lies in memory; immutable.")
      .def(nb::new_([](std::string model, std::vector<std::uint32_t> groups,
                       std::vector<PatternTuple> patterns, std::vector<LayerTuple> layers,
                       std::uint32_t tp_size, std::uint32_t pp_size, std::string scales) {
             auto out = std::make_shared<kvt::Layout>();
             out->model = std::move(model);
             out->scales = std::move(scales);
             out->tp_size = tp_size;
             out->pp_size = pp_size;
             for (const auto block_tokens : groups) out->groups.push_back({block_tokens});
             for (auto& [bytes, views] : patterns) {
               out->patterns.push_back({std::move(bytes), std::move(views)});
             }
             for (const auto& [layer, group, pattern, stage] : layers) {
               out->layers.push_back({layer, group, pattern, stage});
             }
             out->validate();
             return out;
           }),
           nb::kw_only(), "model"_a, "groups"_a, "patterns"_a, "layers"_a, "tp_size"_a = 1,
           "pp_size"_a = 1, "scales"_a = "",
           "groups: tokens per block of each; patterns: (tensor bytes, views); layers: (layer, "
           "group, "
           "pattern, stage), ascending. Raises KvtError(BAD_REQUEST) naming the field.")
      .def_static(
          "parse",
          [](const nb::bytes& data) {
            return unconst(
                kvt::Layout::parse({static_cast<const std::uint8_t*>(data.data()), data.size()}));
          },
          "data"_a, "From a peer's bytes: bounded and validated. Raises KvtError(BAD_REQUEST).")
      .def(
          "serialize",
          [](const kvt::Layout& l) {
            const auto bytes = l.serialize();
            return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
          },
          "Canonical bytes: equal layouts, equal bytes.")
      .def_static(
          "merge_stages",
          [](const std::vector<std::shared_ptr<kvt::Layout>>& stages) {
            const std::vector<std::shared_ptr<const kvt::Layout>> all(stages.begin(), stages.end());
            return std::make_shared<kvt::Layout>(kvt::merge_stages(all));
          },
          "stages"_a, "One layout of those of the pipeline stages. Raises KvtError(INCOMPATIBLE).")
      .def_prop_ro("fingerprint", &kvt::Layout::fingerprint)
      .def_ro("model", &kvt::Layout::model)
      .def_ro("scales", &kvt::Layout::scales)
      .def_ro("tp_size", &kvt::Layout::tp_size)
      .def_ro("pp_size", &kvt::Layout::pp_size)
      .def_prop_ro("num_ranks", &kvt::Layout::num_ranks)
      .def_prop_ro("block_tokens",
                   [](const kvt::Layout& l) {
                     std::vector<std::uint32_t> out;
                     for (const auto& g : l.groups) out.push_back(g.block_tokens);
                     return out;
                   })
      .def_prop_ro("layers",
                   [](const kvt::Layout& l) {
                     std::vector<LayerTuple> out;
                     for (const auto& e : l.layers) {
                       out.emplace_back(e.layer, e.group, e.pattern, e.stage);
                     }
                     return out;
                   })
      .def_prop_ro("patterns",
                   [](const kvt::Layout& l) {
                     std::vector<PatternTuple> out;
                     for (const auto& p : l.patterns) out.emplace_back(p.tensor_bytes, p.views);
                     return out;
                   })
      .def(
          "__eq__",
          [](const kvt::Layout& a, const nb::object& b) {
            return nb::isinstance<kvt::Layout>(b) && a == nb::cast<const kvt::Layout&>(b);
          },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", &kvt::Layout::fingerprint)
      .def("__repr__", [](const kvt::Layout& l) {
        return "<kvt.Layout " + l.model + ", " + std::to_string(l.layers.size()) + " layers, tp " +
               std::to_string(l.tp_size) + ", pp " + std::to_string(l.pp_size) + ">";
      });

  m.def(
      "incompatibilities",
      [](const kvt::Layout& s, const kvt::Layout& t) { return kvt::incompatibilities(s, t); },
      "source"_a, "target"_a, "Every reason why they do not fit, each naming both values.");
  m.def(
      "check_compatible",
      [](const kvt::Layout& s, const kvt::Layout& t) { check_compatible(s, t); }, "source"_a,
      "target"_a, "Raises KvtError(INCOMPATIBLE) with all reasons.");
}

void bind_plans(nb::module_& m) {
  m.attr("NO_BLOCK") = nb::int_(kvt::kNoBlock);
  nb::class_<kvt::PlanPart>(m, "PlanPart", "The same runs for each of some layers.")
      .def_ro("layers", &kvt::PlanPart::layers)
      .def_ro("bytes_per_layer", &kvt::PlanPart::bytes)
      .def_prop_ro("num_runs", [](const kvt::PlanPart& p) { return p.runs.size(); })
      .def_prop_ro(
          "runs",
          [](const kvt::PlanPart& p) {
            std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> out;
            out.reserve(p.runs.size());
            for (const auto& r : p.runs) {
              out.emplace_back(r.src_offset, r.dst_offset, r.length);
            }
            return out;
          },
          "(src_offset, dst_offset, length) of each")
      .def("runs_bytes", &runs_bytes, "The same as native-endian u64 triples.");
  nb::class_<kvt::PairPlanner>(m, "PairPlanner", "Plans from one layout to another. Any thread.")
      .def(nb::new_([](std::shared_ptr<kvt::Layout> source, std::shared_ptr<kvt::Layout> target) {
             return std::make_shared<kvt::PairPlanner>(std::move(source), std::move(target));
           }),
           "source"_a, "target"_a, "Raises KvtError(INCOMPATIBLE).")
      .def("sources_of", &kvt::PairPlanner::sources_of, "target_rank"_a)
      .def("targets_of", &kvt::PairPlanner::targets_of, "source_rank"_a)
      .def(
          "plan",
          [](const kvt::PairPlanner& p, std::uint32_t source_rank, std::uint32_t target_rank,
             const kvt::BlockLists& source_blocks, const kvt::BlockLists& target_blocks,
             std::uint64_t first_token, std::uint64_t end_token, bool last) {
            const nb::gil_scoped_release release;
            return p
                .plan(source_rank, target_rank, source_blocks, target_blocks,
                      {first_token, end_token}, last)
                .parts;
          },
          "source_rank"_a, "target_rank"_a, "source_blocks"_a, "target_blocks"_a, "first_token"_a,
          "end_token"_a, "last"_a, "What moves for tokens [first, end).")
      .def(
          "expected",
          [](const kvt::PairPlanner& p, std::uint32_t source_rank, std::uint32_t target_rank,
             const kvt::BlockLists& target_blocks, std::uint64_t first_token,
             std::uint64_t end_token) {
            const nb::gil_scoped_release release;
            return p.expected(source_rank, target_rank, target_blocks, {first_token, end_token})
                .parts;
          },
          "source_rank"_a, "target_rank"_a, "target_blocks"_a, "first_token"_a, "end_token"_a,
          "Where a whole transfer from one source rank lands; src_offset is 0.");
}

void bind_memory(nb::module_& m) {
  nb::class_<kvt::RankCache>(m, "RankCache", "Where one rank's layers lie in this process.")
      .def(nb::new_([](std::shared_ptr<kvt::Layout> layout, std::uint32_t rank,
                       const std::vector<MemoryTuple>& memory, std::optional<int> cuda_device) {
             std::vector<kvt::LayerMemory> all;
             for (const auto& [layer, tensors] : memory) {
               kvt::LayerMemory one{.layer = layer, .tensors = {}};
               for (const auto& [address, bytes] : tensors) {
                 one.tensors.push_back({reinterpret_cast<std::uint8_t*>(address), bytes});
               }
               all.push_back(std::move(one));
             }
             return std::make_shared<kvt::RankCache>(std::move(layout), rank, std::move(all),
                                                     cuda_device);
           }),
           "layout"_a, "rank"_a, "memory"_a, "cuda_device"_a = nb::none(),
           "memory: (layer, [(address, bytes) of each tensor]); the caller keeps it alive.")
      .def_prop_ro("layout", [](const kvt::RankCache& c) { return unconst(c.shared_layout()); })
      .def_prop_ro("rank", &kvt::RankCache::rank)
      .def_prop_ro("cuda_device", &kvt::RankCache::cuda_device)
      .def(
          "resolve",
          [](const kvt::RankCache& c, std::uint16_t layer, std::uint64_t offset,
             std::uint64_t length) {
            std::vector<AxisTuple> out;
            const bool inside =
                c.resolve(layer, offset, length, [&](std::uint8_t* p, std::uint64_t n) {
                  out.emplace_back(reinterpret_cast<std::uint64_t>(p), n);
                });
            if (!inside) {
              throw kvt::Error(kvt::Code::kBadRequest, "outside of layer " + std::to_string(layer));
            }
            return out;
          },
          "layer"_a, "offset"_a, "length"_a, "(address, bytes) of each piece.");
  m.def(
      "dlpack_info",
      [](const nb::ndarray<nb::ro>& a) {
        std::vector<std::int64_t> shape;
        std::vector<std::int64_t> strides;
        for (std::size_t i = 0; i < a.ndim(); ++i) {
          shape.push_back(static_cast<std::int64_t>(a.shape(i)));
          strides.push_back(a.stride(i));
        }
        return nb::make_tuple(reinterpret_cast<std::uint64_t>(a.data()), shape, strides,
                              static_cast<int>(a.dtype().bits), static_cast<int>(a.dtype().code),
                              a.device_type(), a.device_id());
      },
      "array"_a,
      nb::sig(
          "def dlpack_info(array: object) -> tuple[int, list[int], list[int], int, int, int, int]"),
      "(address, shape, strides in elements, bits, dtype code, device type, device id) of anything "
      "that speaks DLPack.");
  m.def(
      "crc32c",
      [](const nb::bytes& data, std::uint32_t seed) {
        return kvt::crc32c(data.data(), data.size(), seed);
      },
      "data"_a, "seed"_a = 0, "CRC32C of bytes.");
}

}  // namespace

void bind_layout(nb::module_& m) {
  bind_layouts(m);
  bind_plans(m);
  bind_memory(m);
}

}  // namespace kvt_python
