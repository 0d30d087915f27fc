// The C functions through which tejit/jit tells the host part of architecture parts.
#include <unistd.h>

#include "common/error.h"
#include "common/parts.h"

#define TEJIT_EXPORT extern "C" __attribute__((visibility("default")))

TEJIT_EXPORT int tejit_abi(void) {
  return 1;
}

TEJIT_EXPORT const char* tejit_last_error(void) {
  return tejit::last_error().c_str();
}

// Remembers the path only: no file is opened and no CUDA context made before the first op on such a device.
TEJIT_EXPORT int tejit_register_part(int cc, const char* path, int kind) {
  const auto refuse = [](const std::string& why) {
    tejit::last_error() = why;
    return 1;
  };
  try {
    if (kind != 0 && kind != 1) {
      return refuse(tejit::text("tejit_register_part: kind is ", kind,
                                ", but 0 (shared object) or 1 (cubin) is needed"));
    }
    if (cc < 10) {
      return refuse(
          tejit::text("tejit_register_part: cc is ", cc,
                      ", but 10 * major + minor of a compute capability is needed, for example 90"));
    }
    if (path == nullptr || access(path, R_OK) != 0) {
      return refuse(tejit::text("tejit_register_part: ", path ? path : "(null)",
                                " cannot be read; the path of a built part is needed"));
    }
    tejit::Parts::of_process().add(cc, path, static_cast<tejit::PartKind>(kind));
    tejit::last_error().clear();
    return 0;
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
}

TEJIT_EXPORT void tejit_set_part_callback(int (*callback)(int cc)) {
  tejit::Parts::of_process().set_callback(callback);
}
