// Small conversions shared by the two ends of the byte path.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "kvt/code.h"
#include "kvt/data_protocol.h"
#include "kvt/ids.h"

namespace kvt_python {

void bind_data_client(nanobind::module_& m);

template <class Id>
nanobind::bytes id_bytes(const Id& id) {
  return nanobind::bytes(reinterpret_cast<const char*>(id.bytes.data()), id.bytes.size());
}

template <class Id>
Id id_from(const nanobind::bytes& data, const char* what) {
  if (data.size() != 16) {
    throw kvt::Error(kvt::Code::kBadRequest,
                     std::string(what) + ": expected 16 bytes, got " + std::to_string(data.size()));
  }
  return Id::from(data.data());
}

inline std::vector<kvt::wire::TransportKind> transports_of(const std::vector<std::string>& names) {
  using kvt::wire::TransportKind;
  std::vector<TransportKind> kinds;
  for (const std::string& name : names) {
    bool known = false;
    for (const auto kind : {TransportKind::kTcp, TransportKind::kCma}) {
      if (name != kvt::wire::transport_name(kind)) continue;
      kinds.push_back(kind);
      known = true;
    }
    if (!known) {
      throw kvt::Error(kvt::Code::kBadRequest,
                       "transport: expected \"tcp\" or \"cma\", got \"" + name + "\"");
    }
  }
  if (kinds.empty()) throw kvt::Error(kvt::Code::kBadRequest, "transports: empty");
  return kinds;
}

}  // namespace kvt_python
