// Codes, the exception and sizes that Python needs.
#include "bindings.h"
#include "kvt/code.h"
#include "kvt/ipc_block.h"

namespace nb = nanobind;

namespace kvt_python {
namespace {

PyObject* kvt_error_type = nullptr;

void raise_kvt_error(const kvt::Error& error) {
  nb::object instance = nb::borrow(kvt_error_type)(nb::str(error.what()));
  nb::setattr(instance, "code", nb::int_(static_cast<int>(error.code())));
  PyErr_SetObject(kvt_error_type, instance.ptr());
}

}  // namespace

void bind_basic(nb::module_& m) {
  nb::dict members;
  members["code"] = nb::int_(static_cast<int>(kvt::Code::kInternal));
  kvt_error_type = PyErr_NewExceptionWithDoc(
      "kvt_bindings._kvt.KvtError",
      "A call into kvt that failed; `code` is one of the stable outcome codes.", PyExc_RuntimeError,
      members.ptr());
  m.attr("KvtError") = nb::borrow(kvt_error_type);
  nb::register_exception_translator(
      [](const std::exception_ptr& p, void*) {
        try {
          std::rethrow_exception(p);
        } catch (const kvt::Error& e) {
          raise_kvt_error(e);
        }
      },
      nullptr);
  m.attr("IPC_BLOCK_BYTES") = nb::int_(sizeof(kvt::IpcBlock));
  m.def(
      "code_name",
      [](int code) {
        const auto name = kvt::code_name(kvt::code_from_wire(static_cast<std::uint64_t>(code)));
        return nb::str(name.data(), name.size());
      },
      nb::arg("code"), "The name of an outcome code; what names none is INTERNAL.");
}

}  // namespace kvt_python
