#include "bindings.h"

namespace kvt_python {

void bind_receiver(nanobind::module_& m) {
  (void)m;
}

}  // namespace kvt_python
