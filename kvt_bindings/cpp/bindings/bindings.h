// The Python module's parts; each is bound in the file of its name.
#pragma once

#include <nanobind/nanobind.h>

namespace kvt_python {

void bind_basic(nanobind::module_& m);
void bind_layout(nanobind::module_& m);
void bind_channel(nanobind::module_& m);
void bind_sender(nanobind::module_& m);
void bind_receiver(nanobind::module_& m);

}  // namespace kvt_python
