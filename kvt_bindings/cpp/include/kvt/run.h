// The runs of one layer, computed once by the planner and shared, unchanged, by all layers alike.
#pragma once

#include <memory>
#include <vector>

#include "kvt/planner.h"

namespace kvt {

using Runs = std::vector<Run>;
using SharedRuns = std::shared_ptr<const Runs>;

}  // namespace kvt
