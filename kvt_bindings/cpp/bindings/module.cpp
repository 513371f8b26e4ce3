#include "bindings.h"

NB_MODULE(_kvt, m) {
  m.doc() = "Native part of kvt_bindings; import kvt_bindings instead.";
  kvt_python::bind_basic(m);
  kvt_python::bind_layout(m);
  kvt_python::bind_channel(m);
  kvt_python::bind_sender(m);
  kvt_python::bind_receiver(m);
}
